"""Which slot predicts from which row: the shift of autoregressive drafters, the anchors of block drafters."""
