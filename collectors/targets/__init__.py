"""The target as collectors get it: folder, loading, head, families, layers."""
