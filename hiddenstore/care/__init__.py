"""Copies, merges, repair and sweeping of stores."""
