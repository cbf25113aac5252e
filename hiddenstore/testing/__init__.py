"""For tests, ours and those of other backends: builders of small stores, invariants, and what a backend must pass."""
