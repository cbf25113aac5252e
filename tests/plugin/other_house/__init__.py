"""What another house adds to hiddenstore: see pyproject.toml."""
