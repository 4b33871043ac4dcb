"""Tile sizes of the kernels: pure integer functions that return frozen dataclasses (no torch, testable anywhere).

Each file's `__all__` is handed on, so that a new tile is a function in a file and no more.
"""

# ruff: noqa: F403
from .chunk_rows import *
from .common import *
from .expert_tiles import *
from .head_tiles import *
from .layer_tiles import *
from .norm_tiles import *
from .tunable import *
