"""A drafter as it is published: one file a drafter with its names, its config and what each engine reads of it."""
