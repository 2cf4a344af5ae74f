"""Models of a space: from the times of a few candidates, an optimistic guess of the others'.

Optimistic, because what a model is unsure of may be worth a try: the guess is what the model
expects, less a share of how unsure it is. Both models are scikit-learn's.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....installation import how_to_install

Floats = npt.NDArray[np.float64]

# By replay of the recorded tables, 40 searches of 24 evaluations each, chosen / best: the process
# 1.06, 1.07 and 1.03, the forest 1.08, 1.11 and 1.05; half of each was no better than the forest.
MOST_FOR_A_PROCESS = 64  # its time grows with the third power; a forest of so many is as good
_OPTIMISM = {"process": 1.5, "forest": 1.0}  # standard deviations
_TREES = 30  # more of them change little but the time they take


def check_installed() -> None:
    """Raise, with what to do about it, if scikit-learn is missing or cannot be imported."""
    try:
        import sklearn.gaussian_process  # type: ignore[import-untyped]
        import sklearn.tree  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the search strategy 'model' needs scikit-learn: {how_to_install('search')}; or use "
            "the strategy 'random'"
        ) from error


def standardised(features: Floats) -> Floats:
    """A table whose columns, none of them constant, all have mean 0 and deviation 1."""
    standard: Floats = (features - features.mean(axis=0)) / features.std(axis=0)
    return standard


def optimistic(
    features: Floats,
    known: Sequence[int],
    values: Floats,
    wanted: Sequence[int],
    seed: tuple[int, ...],
) -> Floats:
    """An optimistic guess of the value of each wanted row of a table.

    Args:
      features: the table, one row per candidate; no column is constant.
      known: the rows whose values are known.
      values: those values.
      wanted: the rows to guess.
      seed: of what is random in a model.
    """
    rows, asked = list(known), list(wanted)
    if len(known) <= MOST_FOR_A_PROCESS:
        table = standardised(features)
        mean, deviation = _by_process(table[rows], values, table[asked])
        return mean - _OPTIMISM["process"] * deviation
    table = _with_pairs(features)
    mean, deviation = _by_forest(table[rows], values, table[asked], seed)
    return mean - _OPTIMISM["forest"] * deviation


def _by_process(known: Floats, values: Floats, wanted: Floats) -> tuple[Floats, Floats]:
    """A Gaussian process: what is near in the space is near in time, by a length per dimension."""
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import (  # type: ignore[import-untyped]
        ConstantKernel,
        Matern,
        WhiteKernel,
    )
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    smooth = Matern(np.ones(known.shape[1]), (0.2, 10.0), nu=2.5)
    kernel = ConstantKernel(1.0, (0.05, 20.0)) * smooth + WhiteKernel(0.01, (1e-4, 0.1))
    model = GaussianProcessRegressor(kernel, normalize_y=True)
    # One thread: matrices are small, and threads that spin on would disturb what is timed next.
    with warnings.catch_warnings(), threadpool_limits(1, user_api="blas"):
        # A length at the end of its range says that a dimension hardly matters: welcome, not wrong.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(known, values)
        mean, deviation = model.predict(wanted, return_std=True)
    return mean, deviation


def _by_forest(
    known: Any, values: Floats, wanted: Any, seed: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """A forest of random trees; how unsure it is, is how much they disagree."""
    import sklearn
    from sklearn.tree import ExtraTreeRegressor

    known, wanted = known.astype(np.float32), wanted.astype(np.float32)
    generator = np.random.RandomState(int(np.random.default_rng(seed).integers(2**31)))
    # Single trees: the forest class spends three quarters of its time on making them. What they
    # are given is right by construction, so they need not check it.
    trees: list[Any] = [
        ExtraTreeRegressor(max_features=1.0, random_state=generator) for _ in range(_TREES)
    ]
    with sklearn.config_context(skip_parameter_validation=True):
        for tree in trees:
            tree.fit(known, values, check_input=False)
    each = np.array([tree.predict(wanted, check_input=False) for tree in trees])
    return each.mean(axis=0), each.std(axis=0)


def _with_pairs(features: Floats) -> Floats:
    """Sums and differences of sizes too: logarithms of areas and of aspect ratios.

    A tree splits one column at a time, and it is areas that fill a cache.
    """
    sizes = [column for column in features.T if len(np.unique(column)) > 2]
    pairs = list(itertools.combinations(sizes, 2))
    more = [a + b for a, b in pairs] + [a - b for a, b in pairs]
    return np.column_stack([features, *more])
