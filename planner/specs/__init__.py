"""What a user states and what the planner answers, as frozen pydantic models."""
