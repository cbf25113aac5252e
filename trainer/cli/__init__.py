"""trainer/cli."""
