"""Servers of other engines on this machine: how a Python that has one is found, and its process."""
