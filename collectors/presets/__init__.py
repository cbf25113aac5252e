"""Datasets the field uses, by name: a table of hub ids, and how a row of each becomes a conversation."""
