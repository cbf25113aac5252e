"""Several processes or less memory: ranks, shards, split sequences, recomputation, compilation."""
