"""Flash attention."""
