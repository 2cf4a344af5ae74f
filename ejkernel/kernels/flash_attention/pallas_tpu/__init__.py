"""Flash attention for TPU."""
