"""Grouped matrix product: every row times the matrix of its group."""

from .kernel import GroupedMatmul, GroupedMatmulConfig
from .reference import grouped_matmul_reference
from .tile import Tile

__all__ = ["GroupedMatmul", "GroupedMatmulConfig", "Tile", "grouped_matmul_reference"]
