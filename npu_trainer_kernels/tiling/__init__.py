"""Tile sizes of the kernels: pure integer functions that return frozen dataclasses (no torch, testable anywhere)."""

from .chunk_rows import BorrowingChunks, borrowing_chunks, head_chunk, rows_inside, shortest_chunk
from .common import Block, RowTile, accumulating_programs, next_power_of_2, programs
from .expert_tiles import clearing_block, clearing_grid, expert_gate_tile, expert_rows_tile, expert_sums_tile
from .head_tiles import StatisticsTile, fused_tile, gradient_tile, scale_block, statistics_tile, token_block
from .layer_tiles import (
    HeadsTile,
    block_of_rows,
    embedding_tile,
    gate_block,
    rope_pair_tile,
    rope_tile,
    rope_unserved,
    swiglu_block,
    swiglu_unserved,
    vocabulary_tile,
    wants_int32_ids,
)
from .norm_tiles import (
    general_norm_backward_tile,
    general_norm_forward_tile,
    norm_backward_tile,
    norm_forward_tile,
    partial_sums_tile,
)
from .tunable import TUNABLE, asked_tiles, forget_tiles, try_variation, varied

__all__ = ["TUNABLE", "Block", "BorrowingChunks", "HeadsTile", "RowTile", "StatisticsTile", "accumulating_programs",
           "asked_tiles", "block_of_rows", "borrowing_chunks", "clearing_block", "clearing_grid", "embedding_tile",
           "expert_gate_tile", "expert_rows_tile", "expert_sums_tile", "forget_tiles", "fused_tile", "gate_block",
           "general_norm_backward_tile", "general_norm_forward_tile", "gradient_tile", "head_chunk", "next_power_of_2",
           "norm_backward_tile", "norm_forward_tile", "partial_sums_tile", "programs", "rope_pair_tile", "rope_tile",
           "rope_unserved", "rows_inside", "scale_block", "shortest_chunk", "statistics_tile", "swiglu_block",
           "swiglu_unserved", "token_block", "try_variation", "varied", "vocabulary_tile",
           "wants_int32_ids"]  # fmt: skip
