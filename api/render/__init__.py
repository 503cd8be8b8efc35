"""Answers as a person reads them: rich objects, printed by the command line."""
