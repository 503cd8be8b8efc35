"""Trainers: what each assumes, runs, refuses and how it computes; releases parsed once."""
