"""A trainer's own config, launch script or log as a job and a layout, and back into the file."""
