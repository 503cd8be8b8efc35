"""Routes: thin functions that read a request, call `api.service`, and write the answer."""
