"""A trainer's config, launch script or log: read as a job and a layout, and written back."""
