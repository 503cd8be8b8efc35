"""Readers of what people and programs wrote, into plain values."""
