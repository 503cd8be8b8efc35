"""Finding layouts: the legal space, its screening, Optuna where it cannot be enumerated."""
