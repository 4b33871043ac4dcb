"""Counts what a layer's gated delta rule costs besides its arithmetic: PyTorch operators, and bytes kept for backward.

    python -m benchmarks.linear_attention --output benchmarks/results/NAME.json

The layer has 16 key heads and 32 value heads of 128 in bf16, as Qwen3-Next's, and one row of 4,096 or 16,384 tokens.
Ours is `gated_delta_rule` in torch, with a gate for each head or each channel, or without the delta rule (Mamba 2).
Transformers' are the forms in PyTorch that its models run where no kernels are installed. Tensors are fake: they have
shapes and storages, but no memory, and nothing is computed or timed.

An operator is what PyTorch's dispatcher gets below autograd and what is no view of its argument. Kept bytes are those
of all storages that autograd saves, each once; a peak is that of the storages that the operators of forward or of
backward make, results among them, while they live.
"""

import argparse
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_trainer_kernels.ops import gated_delta_rule

from .results import environment

__all__ = ["CASES", "TOKENS", "main", "measure"]

PROGRAM = "python -m benchmarks.linear_attention"
TOKENS = (4096, 16384)
_HEADS, _GROUP, _SIZE = 16, 2, 128

# Views that have no alias in their schema, and what fake tensors ask.
_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default, torch.ops.prim.device.default)

Tensors = dict[str, torch.Tensor]


class _Operators(TorchDispatchMode):
    """Counts operators, and the bytes of storages that they make and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def _freed(self, storage: int) -> None:
        self.live -= self._seen.pop(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        aliases = (r.alias_info for r in func._schema.returns)
        views = func in _VIEWS or any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not views
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.peak = max(self.peak, self.live)
        return result


def _ours(**options: Any) -> Callable[[Tensors], torch.Tensor]:
    def run(given: Tensors) -> torch.Tensor:
        q, k, v, g, beta = (given.get(name) for name in ("q", "k", "v", "g", "beta"))
        o = gated_delta_rule(q, k, v, g, beta, **options, backend="torch")  # type: ignore[arg-type]
        assert isinstance(o, torch.Tensor)
        return o

    return run


def _qwen3_next(given: Tensors) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    function = inspect.unwrap(torch_chunk_gated_delta_rule)
    return function(**_named(given), use_qk_l2norm_in_kernel=True)[0]


def _mamba2(given: Tensors) -> torch.Tensor:
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    q, k, v, g = given.values()
    one = torch.ones(v.shape[2])
    return inspect.unwrap(mamba2_chunk_scan)(v, g, one, k, q, 64, dt_limit=(-torch.inf, torch.inf))


def _named(given: Tensors) -> Tensors:
    long = {"q": "query", "k": "key", "v": "value"}
    return {long.get(name, name): t for name, t in given.items()}


CASES: dict[str, tuple[str, Callable[[Tensors], torch.Tensor]]] = {
    "gate a head": ("ours", _ours(normalize=True)),
    "gate a head, transformers": ("transformers", _qwen3_next),
    "gate a channel": ("ours", _ours(normalize=True)),
    "no delta rule": ("ours", _ours()),
    "no delta rule, transformers": ("transformers", _mamba2),
}


def _inputs(case: str, tokens: int) -> Tensors:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape)

    values = _HEADS * _GROUP
    gate = -drawn(values, *[_SIZE] * ("channel" in case)).exp()
    given = {"q": drawn(_HEADS, _SIZE).bfloat16(), "k": drawn(_HEADS, _SIZE).bfloat16(),
             "v": drawn(values, _SIZE).bfloat16(), "g": gate}  # fmt: skip
    if "no delta" not in case:
        given["beta"] = drawn(values).sigmoid().bfloat16()
    return {name: t.requires_grad_() for name, t in given.items()}


def measure(case: str, tokens: int) -> dict[str, Any]:
    """Returns a row of results: operators forward and backward, bytes kept, and the peak of backward."""
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with FakeTensorMode():
        given = _inputs(case, tokens)
        with _Operators() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            o = CASES[case][1](given)
        upstream = torch.ones_like(o)
        with _Operators() as backward:
            o.backward(upstream)
    return {
        "case": case, "provider": CASES[case][0], "tokens": tokens, "forward_operators": forward.count,
        "backward_operators": backward.count, "kept_bytes": sum(kept.values()), "forward_peak_bytes": forward.peak,
        "backward_peak_bytes": backward.peak,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args(arguments)
    rows = [measure(case, tokens) for case in CASES for tokens in TOKENS]
    if args.output:
        meta = environment(torch.device("cpu"), list(arguments or sys.argv[1:]), module=__spec__.name)
        content = {"meta": meta, "unit": "operators and bytes of one layer", "rows": rows}
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    table = Table(title="one layer, 16 key heads and 32 value heads of 128, bf16")
    for column in ("", "tokens", "operators forward", "backward", "MiB kept", "MiB at the peak, forward", "backward"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        counts = (row[name] for name in ("tokens", "forward_operators", "backward_operators"))
        sizes = (row[name] / 2**20 for name in ("kept_bytes", "forward_peak_bytes", "backward_peak_bytes"))
        table.add_row(row["case"], *(f"{count:,}" for count in counts), *(f"{size:,.0f}" for size in sizes))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
