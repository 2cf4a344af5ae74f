"""Flash attention for GPU."""
