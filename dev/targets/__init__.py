"""Says what a Triton kernel becomes on each card, by its compiler alone: no GPU is needed, and nothing runs."""
