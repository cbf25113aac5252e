"""Records → drafter: objectives, training, evaluation, export and serving."""
