"""A training run, or several beside each other, as one HTML page that needs nothing beside it."""
