"""Measuring: short real jobs, and what happened to them."""
