"""Conversations → DATA: the chat template, loss masks, turn spans, and the parquet parts they are written to."""
