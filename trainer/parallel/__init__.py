"""Several processes: ranks, shards, split sequences."""
