"""Calls of the package's ops that the vendor's operators cover: one table for shapes (on meta) and for values."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_trainer_kernels import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """`op(*inputs, backend=...)`, which covers `dtypes`, beside `reference(*inputs)`.

    Attributes:
        inputs: makes the inputs in a dtype; gradients are asked for those that require one.
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[torch.dtype], list[torch.Tensor | None]]
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def __str__(self) -> str:
        return self.name


def _floats(*shape: int, dtype: torch.dtype, trained: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=trained)


def _norm(name: str, *shape: int, weight: torch.dtype | None = None, trained: bool = True,
          dtypes: tuple[torch.dtype, ...] = DTYPES, **options: Any) -> Call:  # fmt: skip
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        x = _floats(*shape, dtype=dtype)
        return [x, _floats(shape[-1], dtype=weight or dtype, trained=trained)]

    return Call(f"rms_norm {name}", partial(ops.rms_norm, **options), partial(ops.rms_norm_reference, **options),
                inputs, dtypes)  # fmt: skip


def _add_norm(name: str, *shape: int, dtypes: tuple[torch.dtype, ...] = DTYPES, **options: Any) -> Call:
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        return [_floats(*shape, dtype=dtype), _floats(*shape, dtype=dtype), _floats(shape[-1], dtype=dtype)]

    return Call(f"add_rms_norm {name}", partial(ops.add_rms_norm, **options),
                partial(ops.add_rms_norm_reference, **options), inputs, dtypes)  # fmt: skip


def _swiglu(name: str, *shape: int) -> Call:
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        return [_floats(*shape, dtype=dtype), _floats(*shape, dtype=dtype)]

    return Call(f"swiglu {name}", ops.swiglu, ops.swiglu_reference, inputs)


def _joined_swiglu(name: str, *shape: int) -> Call:
    def op(gate: torch.Tensor, **backend: str) -> torch.Tensor:
        return ops.swiglu(gate, joined="halves", **backend)

    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        return [_floats(*shape, dtype=dtype)]

    return Call(f"swiglu of one tensor, {name}", op, partial(ops.swiglu_reference, joined="halves"), inputs)


def _swiglu_linear(name: str, *shape: int, frozen: bool = False) -> Call:
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        return [
            _floats(*shape, dtype=dtype),
            _floats(*shape, dtype=dtype),
            (torch.randn(5, shape[-1]) / shape[-1] ** 0.5).to(dtype).requires_grad_(not frozen),
        ]

    return Call(f"swiglu with its projection, {name}", ops.swiglu_linear, ops.swiglu_linear_reference, inputs)


def _linear_norm(name: str, *shape: int, frozen: bool = False) -> Call:
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        weight = (torch.randn(6, shape[-1]) / shape[-1] ** 0.5).to(dtype).requires_grad_(not frozen)
        return [_floats(*shape, dtype=dtype), weight, _floats(3, dtype=dtype)]

    return Call(f"rms_norm of projected heads, {name}", ops.linear_rms_norm, ops.linear_rms_norm_reference, inputs)


def _rope(name: str, batch: int, tokens: int, size: int, tables: int, transposed: bool = False) -> Call:
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        q, k = ((batch, tokens, heads, size) if transposed else (batch, heads, tokens, size) for heads in (6, 2))
        angles = torch.randn(tables, tokens, size)
        return [_floats(*q, dtype=dtype), _floats(*k, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)]

    def turned(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor, **backend: str) -> Any:
            return op(q.transpose(1, 2), k.transpose(1, 2), *tables, **backend)

        return call if transposed else op

    return Call(f"rope {name}", turned(ops.rope), turned(ops.rope_reference), inputs)


def _cross_entropy(name: str, n: int, hidden: int, vocabulary: int, *, bias: bool = False, weights: bool = False,
                   frozen: bool = False, ids: torch.dtype = torch.int64, **options: Any) -> Call:  # fmt: skip
    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        return [
            _floats(n, hidden, dtype=dtype),
            (torch.randn(vocabulary, hidden) / hidden**0.5).to(dtype).requires_grad_(not frozen),
            torch.randint(vocabulary, (n,), dtype=ids),
            _floats(vocabulary, dtype=dtype) if bias else None,
            torch.rand(vocabulary) + 0.5 if weights else None,
            torch.arange(n),
        ]

    def op(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
           class_weights: torch.Tensor | None, rows: torch.Tensor, backend: str) -> torch.Tensor:  # fmt: skip
        # With `rows` no value is looked at, so that meta tensors will do.
        return ops.fused_linear_cross_entropy(
            x, weight, target, bias, class_weights=class_weights, rows=rows, chunk_rows=3, backend=backend, **options
        )

    def reference(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
                  class_weights: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:  # fmt: skip
        return ops.linear_cross_entropy_reference(x, weight, target, bias, class_weights=class_weights, **options)

    return Call(f"linear_cross_entropy {name}", op, reference, inputs)


_TREE = (5, 1, 7, 3), (None, 0, None, 1)
"""Lengths of segments, and the segment whose keys each sees before its own."""


def _of_tree(device: torch.device) -> ops.Segments:
    lengths, parents = _TREE
    ends = np.cumsum(lengths)
    keys: list[np.ndarray] = []
    for end, length, parent in zip(ends, lengths, parents, strict=True):
        own = np.arange(end - length, end)
        keys.append(own if parent is None else np.concatenate((keys[parent], own)))
    shared = ops.Shared.make(np.concatenate(keys), int(ends[-1]), device)
    return ops.Segments.make(lengths, device, [len(part) for part in keys], shared)


def _attention(name: str, *, heads: tuple[int, int] = (4, 2), shared: bool = True, sinks: bool = False,
               dtypes: tuple[torch.dtype, ...] = DTYPES, **options: Any) -> Call:  # fmt: skip
    def call(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, **backend: str) -> Any:
            segments = _of_tree(q.device) if shared else ops.Segments.make(_TREE[0], q.device)
            return op(q, k, v, segments, sinks=sink, **options, **backend)

        return run

    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        n = sum(_TREE[0])
        q, k, v = (_floats(n, count, 16, dtype=dtype) for count in (heads[0], heads[1], heads[1]))
        return [q, k, v, _floats(heads[0], dtype=dtype) if sinks else None]

    return Call(f"varlen_attention {name}", call(ops.varlen_attention), call(ops.varlen_attention_reference), inputs,
                dtypes)  # fmt: skip


def _experts(name: str, *, biased: bool = False, transposed: bool = False, homeless: int = 0,
             ids: torch.Tensor | None = None, **options: Any) -> Call:  # fmt: skip
    """Five experts of 16 columns, of which the second has no rows."""

    def inputs(dtype: torch.dtype) -> list[torch.Tensor | None]:
        drawn = torch.tensor([0, 2, 3, 4, *range(5, 5 + homeless)])[torch.randint(4 + homeless, (11, 3))]
        width = 16 * (2 if options.get("gated", True) else 1)
        up, down = torch.randn(5, width, 24) / 5, torch.randn(5, 24, 16) / 4
        if transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        weights = torch.rand(11, 3).to(dtype).requires_grad_()
        biases = [_floats(5, columns, dtype=dtype) if biased else None for columns in (width, 24)]
        return [
            _floats(11, 24, dtype=dtype), drawn if ids is None else ids, weights, up.to(dtype).requires_grad_(),
            down.to(dtype).requires_grad_(), *biases,
        ]  # fmt: skip

    def call(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
                up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, **backend: str) -> Any:  # fmt: skip
            return op(x, ids, weights, up, down, gate_up_bias=up_bias, down_bias=down_bias, transposed=transposed,
                      **options, **backend)  # fmt: skip

        return run

    return Call(f"moe_experts {name}", call(ops.moe_experts), call(ops.moe_experts_reference), inputs)


_IN_16_BITS = (torch.bfloat16, torch.float16)

CALLS = (
    _norm("llama", 3, 5, 7),
    _norm("llama, wide", 9, 896, eps=1e-5),
    _norm("llama, offset", 4, 33, offset=0.5),
    _norm("gemma", 4, 33, casting="gemma"),
    _norm("gemma, offset 1", 4, 33, casting="gemma", offset=1.0),
    _norm("gemma, fp32 weight", 4, 33, casting="gemma", offset=1.0, weight=torch.float32),
    _norm("none in fp32", 4, 33, casting="none", dtypes=(torch.float32,)),
    _norm("frozen weight", 4, 33, trained=False),
    _norm("no rows", 0, 33),
    _add_norm("llama", 3, 5, 7),
    _add_norm("llama, offset", 4, 33, offset=0.5, eps=1e-5),
    _add_norm("gemma in fp32", 4, 33, casting="gemma", offset=1.0, dtypes=(torch.float32,)),
    _swiglu("odd", 3, 5, 7),
    _swiglu("row", 33),
    _swiglu("empty", 0, 7),
    _joined_swiglu("halves", 3, 5, 14),
    _joined_swiglu("empty", 0, 14),
    _swiglu_linear("trained", 3, 5, 7),
    _swiglu_linear("frozen", 3, 5, 7, frozen=True),
    _linear_norm("trained", 3, 5, 7),
    _linear_norm("frozen", 3, 5, 7, frozen=True),
    _rope("tables for all", 2, 5, 8, tables=1),
    _rope("tables for each", 2, 5, 6, tables=2),
    _rope("tokens before heads", 2, 7, 8, tables=1, transposed=True),
    _cross_entropy("mean", 10, 9, 33),
    _cross_entropy("sum, int32", 10, 9, 33, reduction="sum", ids=torch.int32),
    _cross_entropy("none", 10, 9, 33, reduction="none"),
    _cross_entropy("none, frozen head", 10, 9, 33, reduction="none", frozen=True),
    _cross_entropy("bias, class weights", 10, 9, 33, bias=True, weights=True),
    _cross_entropy("num_items", 10, 9, 33, num_items=4),
    _experts("as it is"),
    _experts("transposed, biased", transposed=True, biased=True),
    _experts("interleaved", interleaved=True, alpha=1.702, limit=1.0, offset=1.0),
    _experts("no gate", gated=False, gate="relu2"),
    _experts("rows without an expert", homeless=2),
    _experts("all in one expert", ids=torch.full((11, 3), 4)),
    _experts("a gate of its own", gate=lambda h: torch.tanh(h[:, :16]) * h[:, 16:], homeless=2, biased=True),
    _attention("causal", shared=False),
    _attention("shared keys"),
    _attention("scale, a head each", heads=(3, 3), scale=0.3),
    _attention("window", window=4),
    _attention("window of equal lengths", shared=False, window=2),
    _attention("window wider than all", window=100),
    _attention("sinks", sinks=True, dtypes=_IN_16_BITS),
    _attention("sinks, window", sinks=True, window=4, dtypes=_IN_16_BITS),
)
CASES = [(call, dtype) for call in CALLS for dtype in call.dtypes]
NAMES = [f"{call}-{str(dtype).removeprefix('torch.')}" for call, dtype in CASES]


def upstream(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A scalar that every element of every output counts in, with a factor of its own."""
    total = 0.0
    for output in outputs:
        factors = torch.arange(output.numel(), device=output.device, dtype=torch.float64).sin().view(output.shape)
        total = total + (output.double() * factors).sum()
    return total


class Recorder(TorchDispatchMode):
    """Notes which of torch_npu's operators are called inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.names.add(func._schema.name.removeprefix("npu::"))
        return func(*args, **(kwargs or {}))
