"""Programs that stand in for what a probe starts: light, and able to fail in every way."""
