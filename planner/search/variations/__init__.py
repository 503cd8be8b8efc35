"""A layout with one thing changed: neighbours, sensitivity, memory budgets, layer splits."""
