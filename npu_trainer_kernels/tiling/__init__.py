"""Tile sizes of the kernels: pure integer functions that return frozen dataclasses (no torch, testable anywhere).

- `common`: integer arithmetic, the number of programs, and the tile classes that several kernels use.
- `norm_tiles`, `layer_tiles`, `expert_tiles`, `head_tiles`: one function for each kernel's tile.
- `chunk_rows`: the number of rows of logits that the head has in memory at a time.
- `limits`: the limits of tiles on an NPU, from `tiles.json`, with the trials from which each limit was chosen.
- `tunable`: marks the functions whose tiles `npu-kernels tune` may vary, and applies the variation in use.

An op asks for the tile of its shapes and device at each call. The names in each file's `__all__` are handed on, so a
new tile needs only its function. `ascend.sweep`, which writes `tiles.json`, imports the module `limits` from here.
"""

# ruff: noqa: F403
from .chunk_rows import *
from .common import *
from .expert_tiles import *
from .head_tiles import *
from .layer_tiles import *
from .norm_tiles import *
from .tunable import *
