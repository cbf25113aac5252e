"""Which samples a store holds, from its commit records or, for many of them, from the index files that cover them."""
