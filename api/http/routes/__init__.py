"""Routes: thin functions that read a request, call `planner.api.service`, and write the answer."""
