"""collectors/cli."""
