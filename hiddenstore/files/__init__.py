"""The files of a store: their names, their sealed documents, their digests, what counts as damage of them."""
