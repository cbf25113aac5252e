"""Stores and exported drafters to others and from them: the hub, object storage, cards."""
