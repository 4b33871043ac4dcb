"""Counts the host's instructions per call of an op, in Python and PyTorch, without a GPU.

    python -m benchmarks.host --output benchmarks/results/NAME.json
    python -m benchmarks.host --compare OLD.json
    python -m benchmarks.host --counter steps --calls 1 --only "a token*"

A small model's step waits for Python. Its times differ by a factor of two between hosts and between runs; instruction
counts are reproducible within a hundredth. Triton compiles for a GPU with a driver that launches nothing, so the count
has all work before a launch; the grouped matrix product of experts and the replay of a graph compute nothing either.
Tensors are on the CPU and tiny: the computations of PyTorch's other operators are included, and small, but for those of
attention, which are counted alone as well. The other cases are a transformers decoder layer, plain and with the
kernels, a model of two layers with the kernels, its body captured or not, and the same model that gets one token of
each row, as in generation, plain and with the kernels.
The benchmark needs Linux. It counts by hardware counters (`perf_event_open`), over 200 calls; where there are none, as
in most virtual machines and containers, by single steps (`ptrace`), of one call. A step takes 20 microseconds, all
cases a quarter of an hour. No garbage is collected while steps are counted; the mean by hardware has its share of that.
"""

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget

from npu_trainer_kernels import apply_npu_kernels, ops
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.capture.tape import Tape

from .instructions import COUNTERS, Counter, counter_of
from .results import environment

__all__ = ["CASES", "WARM_UP", "Driver", "gpu_that_does_nothing", "main", "measure"]

PROGRAM = "python -m benchmarks.host"
_H200 = devices.DeviceSpec("cuda", "NVIDIA H200", 132, 256 << 10, 140 << 30)
_DTYPE = torch.bfloat16
_HIDDEN, _HEADS, _KEYS, _SIZE, _MLP, _EXPERTS = 64, 4, 2, 16, 128, 4
_TOKENS = (2, 16)
WARM_UP = 10

Case = Callable[[], Callable[[], Any]]
"""A function that prepares a call and returns it."""


class Driver:
    """A driver for Triton that launches nothing."""

    def __init__(self) -> None:
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *args: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": 228 << 10}

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the shape that PyTorch's `grouped_mm`, a loop over experts on the host, returns."""
    return a.new_empty(a.shape[0], b.shape[2]) if b.dim() == 3 else a.new_empty(len(offs), a.shape[0], b.shape[1])


# Functions, since a call of a Mock takes some twelve calls of Python.
def _keeps_compiled(device: torch.device) -> bool:
    return True


def _replay(tape: Tape) -> None:
    pass


@contextmanager
def gpu_that_does_nothing() -> Iterator[None]:
    """Inside the `with` block ops treat CPU tensors as tensors on an H200, up to a kernel's launch."""
    with (
        mock.patch.object(triton.runtime.driver, "_active", Driver()),
        mock.patch.object(devices, "keeps_compiled", _keeps_compiled),
        mock.patch.object(F, "grouped_mm", _grouped_mm, create=True),
        mock.patch.object(Tape, "replay", _replay),
        devices.stand_in(_H200),
    ):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------


def _tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.zeros(shape, dtype=_DTYPE).requires_grad_(grad)


def _rms_norm() -> Callable[[], Any]:
    x, weight = _tensor(*_TOKENS, _HIDDEN), _tensor(_HIDDEN)
    return lambda: ops.rms_norm(x, weight)


def _add_rms_norm() -> Callable[[], Any]:
    x, residual, weight = _tensor(*_TOKENS, _HIDDEN), _tensor(*_TOKENS, _HIDDEN), _tensor(_HIDDEN)
    return lambda: ops.add_rms_norm(x, residual, weight)


def _linear_rms_norm() -> Callable[[], Any]:
    x, weight, norm_weight = _tensor(*_TOKENS, _HIDDEN), _tensor(_HEADS * _SIZE, _HIDDEN), _tensor(_SIZE)
    return lambda: ops.linear_rms_norm(x, weight, norm_weight)


def _swiglu() -> Callable[[], Any]:
    gate, up = _tensor(*_TOKENS, _MLP), _tensor(*_TOKENS, _MLP)
    return lambda: ops.swiglu(gate, up)


def _rope() -> Callable[[], Any]:
    q, k = _tensor(2, _HEADS, 16, _SIZE), _tensor(2, _KEYS, 16, _SIZE)
    cos, sin = _tensor(1, 16, _SIZE, grad=False), _tensor(1, 16, _SIZE, grad=False)
    return lambda: ops.rope(q, k, cos, sin)


def _embedding() -> Callable[[], Any]:
    ids, weight = torch.zeros(_TOKENS, dtype=torch.long), _tensor(64, _HIDDEN)
    return lambda: ops.embedding(ids, weight)


def _moe_experts() -> Callable[[], Any]:
    x, ids, weights = _tensor(16, _HIDDEN), torch.arange(32).view(16, 2) % _EXPERTS, _tensor(16, 2)
    gate_up, down = _tensor(_EXPERTS, 2 * _SIZE, _HIDDEN), _tensor(_EXPERTS, _HIDDEN, _SIZE)
    return lambda: ops.moe_experts(x, ids, weights, gate_up, down)


def _model(patched: bool, capture: str = "off") -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=2, hidden_size=_HIDDEN, intermediate_size=_MLP, num_attention_heads=_HEADS,
            num_key_value_heads=_KEYS, head_dim=_SIZE, vocab_size=64,
        )
    )  # fmt: skip
    model.to(_DTYPE)
    if patched:
        apply_npu_kernels(model.train(), capture=capture)
    return model


def _layer(patched: bool) -> Callable[[], Any]:
    model = _model(patched)
    layers, x = model.model.layers, _tensor(*_TOKENS, _HIDDEN)
    tables = _tensor(2, 16, _SIZE, grad=False), _tensor(2, 16, _SIZE, grad=False)

    def call(model: Any = model) -> Any:  # keeps the model alive, with which its patch ends
        return layers[0](x, position_embeddings=tables, attention_mask=None)

    return call


def _logits(capture: str) -> Callable[[], Any]:
    model, ids = _model(True, capture), torch.zeros(*_TOKENS, dtype=torch.long)
    return lambda: (model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits,)


def _attention() -> Callable[[], Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = _model(False).model.layers[0].self_attn
    q, k, v = (_tensor(2, heads, 16, _SIZE) for heads in (_HEADS, _KEYS, _KEYS))
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    return lambda: attend(attention, q, k, v, None, scaling=attention.scaling)


def _token(patched: bool) -> Callable[[], Any]:
    model, ids = _model(patched), torch.zeros(8, 1, dtype=torch.long)

    def call() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True)

    return call


CASES: dict[str, Case] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "linear_rms_norm": _linear_rms_norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "embedding": _embedding,
    "moe_experts": _moe_experts,
    "decoder layer, plain": lambda: _layer(False),
    "decoder layer, patched": lambda: _layer(True),
    "two layers, patched": lambda: _logits("off"),
    "two layers, captured": lambda: _logits("on"),
    "attention of the layer, alone": _attention,
    "a token through two layers, plain": lambda: _token(False),
    "a token through two layers, patched": lambda: _token(True),
}


def measure(case: Case, counter: Counter, calls: int) -> dict[str, float]:
    """Returns thousands of instructions of a call's forward and of its backward, the mean of so many calls."""
    call = case()

    def outputs() -> list[torch.Tensor]:
        result = call()
        found = result if isinstance(result, tuple) else (result,)
        return [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]

    def step(count: Callable[[Callable[[], Any]], tuple[Any, int]]) -> tuple[int, int]:
        # A captured body waits for its backward before its next forward, so they take turns.
        found, forward = count(outputs)
        upstream = [torch.zeros_like(t) for t in found]
        _, backward = count(lambda: torch.autograd.backward(found, upstream))
        return forward, backward

    for _ in range(WARM_UP):
        step(lambda function: (function(), 0))
    forward, backward = zip(*(step(counter.count) for _ in range(calls)), strict=True)
    return {"forward": round(sum(forward) / calls / 1e3, 1), "backward": round(sum(backward) / calls / 1e3, 1)}


def _table(rows: dict[str, dict[str, float]], old: dict[str, dict[str, float]]) -> Table:
    table = Table(title="thousand instructions per call")
    for column in ("", "forward", "backward", *(("forward before", "backward before", "change") if old else ())):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        cells = [name, f"{row['forward']:.0f}", f"{row['backward']:.0f}"]
        if name in old:
            before = old[name]
            change = sum(row.values()) / sum(before.values()) - 1
            cells += [f"{before['forward']:.0f}", f"{before['backward']:.0f}", f"{change:+.1%}"]
        table.add_row(*cells)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="an earlier one, whose figures stand beside these")
    parser.add_argument(
        "--counter", choices=("auto", *COUNTERS), default="auto", help="auto: hardware counters, or else single steps"
    )
    parser.add_argument("--calls", type=int, help="the number of counted calls (200 by hardware, 1 by steps)")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="cases to count; may be repeated")
    args = parser.parse_args(arguments)
    old = json.loads(args.compare.read_text(encoding="utf-8"))["rows"] if args.compare else {}
    cases = {n: c for n, c in CASES.items() if not args.only or any(fnmatch.fnmatch(n, p) for p in args.only)}
    if not cases:
        parser.error(f"--only {' '.join(args.only)} matches none of: {', '.join(CASES)}")
    if args.calls is not None and args.calls < 1:
        parser.error(f"--calls {args.calls} is not at least 1")
    torch.set_num_threads(1)
    try:
        counter = counter_of(args.counter)
    except OSError as error:
        parser.error(f"no instructions can be counted here: {error.strerror}")
    calls = args.calls or counter.calls
    console = Console()
    console.print(f"counted by {counter.name}, calls per case: {calls}")
    with gpu_that_does_nothing():
        rows = {name: measure(case, counter, calls) for name, case in cases.items()}
    if args.output:
        meta = environment(torch.device("cpu"), list(arguments or sys.argv[1:]), module=__spec__.name)
        meta |= {"counter": counter.name, "calls": calls}
        content = {"meta": meta, "unit": "thousand instructions per call", "rows": rows}
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(_table(rows, old))
    return 0


if __name__ == "__main__":
    sys.exit(main())
