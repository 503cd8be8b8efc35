"""Programs that train: how each is started for a few steps, and how its numbers are read."""
