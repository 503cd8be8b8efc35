"""A Hugging Face config.json, or shapes by its keys, as a model."""
