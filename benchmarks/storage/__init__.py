"""`make bench-storage`: what a token costs to store, write and read, beside the formats others use."""
