"""One training run: its folder, its steps, what it keeps and how it starts."""
