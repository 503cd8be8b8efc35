"""What people and programs wrote, read into plain values."""
