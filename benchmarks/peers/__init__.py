"""Peers that need an environment of their own: each runs in its Python and times on request."""
