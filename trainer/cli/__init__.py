"""The commands of the trainer, each imported when it runs."""
