"""Drafters in use: simulated over recorded text and live beside the target."""
