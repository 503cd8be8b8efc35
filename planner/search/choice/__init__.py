"""Which of the best layouts are shown, and which one comes first."""
