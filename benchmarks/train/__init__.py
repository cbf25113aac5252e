"""Training benchmark: one step of EAGLE-3 and DFlash beside installed peers, its growth, and a script for GPUs."""
