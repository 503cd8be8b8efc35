"""From a job to a plan: the use case, its explanations, and the comparison with today's layout."""
