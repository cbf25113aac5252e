"""Answers written anew, by the target in this process or behind a server, kept as they come."""
