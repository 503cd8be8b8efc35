"""Work that takes long: probes, studies and sweeps, queued and held under leases."""
