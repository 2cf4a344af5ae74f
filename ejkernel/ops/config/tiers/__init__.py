"""The sources of configs, one file each. The chain asks them in order.

A tier answers with a `TierHit` or says why it has nothing. It knows nothing of the other tiers.
"""
