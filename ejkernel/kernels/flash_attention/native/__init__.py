"""Flash attention in C++."""
