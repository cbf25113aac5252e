"""Which recipe a target's states can take: every recipe measured on a raw slice of them."""
