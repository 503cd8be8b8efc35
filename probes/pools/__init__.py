"""Where probes run: this machine, or a Slurm cluster."""
