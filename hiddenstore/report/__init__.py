"""A store as one HTML page that needs nothing beside it: the page with its charts, and what a store's page says."""
