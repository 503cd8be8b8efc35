"""What measurements teach, kept and listed."""
