"""Statements of a user and answers of the planner, as frozen pydantic models."""
