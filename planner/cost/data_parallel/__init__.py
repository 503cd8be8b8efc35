"""Sharded parameters, their communication under the backward, and the optimizer step."""
