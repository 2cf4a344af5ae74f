r"""Flash attention in plain JAX: tiles, an online softmax, no score matrix.

Queries and keys are cut into blocks, and one tile of scores (one query block against one key block,
for some heads) exists at a time, so memory grows linearly with the sequence in both directions.
`forward` and `backward` have the mathematics; arithmetic is in float32, or in float64 where the
queries are.

Which tiles exist follows from positions (`causal`, `window`), from segment ids, lengths and the
mask: `tiling.Needed` turns them into bounds of the loops, and what lies outside is never computed.
What a tile does with its scores is in `tile.Tile`, once for both passes.
"""
