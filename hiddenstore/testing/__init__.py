"""For tests, ours and those of other backends: builders, a filesystem that fails on purpose, and invariants."""
