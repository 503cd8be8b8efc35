"""What a user says and what the planner answers, as frozen pydantic models."""
