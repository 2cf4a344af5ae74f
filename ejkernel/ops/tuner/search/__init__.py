"""Which candidates to measure: strategies, a model of the space, pruning, effort and budgets."""
