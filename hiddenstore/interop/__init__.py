"""Other projects' data layouts, one module each."""
