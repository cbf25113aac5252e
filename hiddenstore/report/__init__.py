"""A store as one HTML page that needs nothing beside it: the page, its charts, and what a store's page says."""
