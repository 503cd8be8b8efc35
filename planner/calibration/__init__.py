"""Learning from measurements: accuracy, intervals, profiles."""
