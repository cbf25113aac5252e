"""Attention that no library has: of training-time test, and of blocks."""
