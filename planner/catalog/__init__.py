"""The models, GPUs and clusters that are known by name, with the source of every figure."""
