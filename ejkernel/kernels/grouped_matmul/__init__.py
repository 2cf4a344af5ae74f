"""Grouped matrix product: every row times the matrix of its group."""

from ..tile import Tile
from .kernel import GroupedMatmul, GroupedMatmulConfig
from .reference import grouped_matmul_reference

__all__ = ["GroupedMatmul", "GroupedMatmulConfig", "Tile", "grouped_matmul_reference"]
