"""Prepared inputs: DATA folders, and what a store registers of them."""
