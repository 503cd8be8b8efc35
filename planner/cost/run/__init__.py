"""A whole run: checkpoints, failures, goodput, energy and price."""
