"""What is known by name: models, GPUs, clusters, with the source of every figure."""
