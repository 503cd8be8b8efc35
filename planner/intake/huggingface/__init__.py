"""Reads a Hugging Face config.json, or shapes under its keys, as a model."""
