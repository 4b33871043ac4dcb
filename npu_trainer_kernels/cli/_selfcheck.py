"""Checks whether every op is correct on this machine's device, and faster than plain PyTorch.

`doctor` runs this file in a separate process, because a faulty kernel may crash its process or the device. The file
writes one line of JSON for each result.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .. import backends, device
from ..closeness import Tensors, assert_op_close
from ..descriptions import Inputs, ModelShapes, Workload, of_model
from ..evidence.table import op_of
from ..timing import QUICK, is_accelerator, measure, rotation
from ._process import Lines

__all__ = ["CHECKED", "CHECKED_DTYPES", "CHECKED_TOKENS", "TIMED", "check", "facts", "main", "time_op"]

# The sizes are small, since the truth is computed in fp64, and no tile divides them, so that tails are checked.
CHECKED = ModelShapes(
    hidden=328,
    intermediate=712,
    vocabulary=2053,
    heads=4,
    kv_heads=2,
    head_dim=72,
    experts=5,
    slots=2,
    channels=328,
    taps=4,
    state_keys=2,
    state_values=4,
    key_size=24,
    value_size=40,
)
CHECKED_TOKENS = 136
CHECKED_DTYPES = ("float32", "bfloat16")
# By whether the device is an accelerator: shapes at which the kernels dominate the time; on a CPU small ones. They
# have no linear attention, whose reference is a loop over tokens, which no model runs in training: it is not timed.
TIMED = {
    True: (ModelShapes(2048, 8192, 128256, 32, 8, head_dim=64, experts=8, slots=2, channels=8192, taps=4), 4096),
    False: (ModelShapes(256, 704, 4096, 4, 2, head_dim=64, experts=8, slots=2, channels=256, taps=4), 512),
}


def _upstream(inputs: Inputs) -> Callable[[Tensors], torch.Tensor]:
    """Returns a function that computes the scalar whose gradients are those of `inputs.backward`."""

    def scalar(outputs: Tensors) -> torch.Tensor:
        given = [output for output in outputs if output is not None]
        if not inputs.grads:
            return given[0]
        return torch.stack([(o * g.to(o)).sum() for o, g in zip(given, inputs.grads, strict=True)]).sum()

    return scalar


def check(work: Workload, where: torch.device, backend: str | None = None) -> str | None:
    """Returns what is wrong with an op, forward or backward, or None, by the rule of `closeness`; an infinity or NaN
    where the reference is finite breaks it."""
    torch.manual_seed(0)
    inputs = work.inputs(where)
    names = list(inputs.tensors)
    ours, reference = work.ours(backend), work.reference

    def by_position(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: fn(dict(zip(names, values, strict=True)))

    try:
        assert_op_close(by_position(ours), by_position(reference), list(inputs.tensors.values()), _upstream(inputs))
    except AssertionError as error:
        return str(error)
    return None


def time_op(work: Workload, where: torch.device, backend: str | None = None) -> dict[str, Any]:
    """Returns the milliseconds of forward and backward, of the op and of plain PyTorch."""
    torch.manual_seed(0)
    first = work.inputs(where)
    sets = [first] + [work.inputs(where) for _ in range(rotation(where, first.bytes()) - 1)]
    found = {}
    for name, fn in (("ours", work.ours(backend)), ("plain", work.reference)):
        summary, _ = measure(fn, sets, "both", where, QUICK, cold=True)
        found[name] = summary
    return {
        "shape": work.shape,
        "dtype": work.dtype,
        **{name: asdict(summary) for name, summary in found.items()},
        "slower": found["ours"].slower_than(found["plain"]),
    }


def facts(where: torch.device) -> dict[str, Any]:
    """Returns the device's properties, the chip whose tiles it uses, and why it is not an NPU, if torch_npu is
    installed."""
    spec = device.spec(where)
    return {
        "device": {
            "kind": spec.kind,
            "name": spec.name,
            "memory_bytes": spec.memory_bytes,
            "vector_cores": spec.vector_cores,
            "graphs": _graphs(where),
        },
        "sized_as": device.sized_as(spec.name).name if spec.kind == "npu" else spec.name,
        "without_npu": device.torch_npu_state(),
    }


def _graphs(where: torch.device) -> dict[str, Any] | None:
    """Returns the class of the device's graphs, by which bodies are captured, and how many it can have (None: memory is
    the limit); None if it has none."""
    if where.type == "cpu":
        return None
    graph = device.graph_class(where)
    return (
        None if graph is None else {"class": f"torch.{where.type}.{graph.__name__}", "most": device.most_graphs(where)}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", required=True, help="names of the table's forms, comma-separated")
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args(arguments)
    emit = Lines().write
    where = torch.device(device.accelerator())
    emit(**facts(where))
    accelerated = is_accelerator(where)
    shapes, tokens = TIMED[accelerated]
    timed = {work.op: work for work in of_model(shapes, tokens, "bfloat16" if accelerated else "float32")}
    checked = {dtype: {work.op: work for work in of_model(CHECKED, CHECKED_TOKENS, dtype)} for dtype in CHECKED_DTYPES}
    for op in args.ops.split(","):
        backend_op = op_of(op)
        for dtype, works in checked.items():
            if op not in works:
                emit(op=op, unchecked=f"{CHECKED} has no sizes for it")
                break
            name, reason = backends.explain(backend_op, where)
            # Written before the check, so that the parent knows which op was running if this process dies.
            emit(op=op, dtype=dtype, backend_op=backend_op, backend=name, reason=reason, begins=True)
            emit(op=op, dtype=dtype, backend_op=backend_op, problem=check(works[op], where))
        plain = backends.keeps_plain(backend_op, where)
        # Measurements of `tune` take precedence over the table in their ranges.
        measured = [str(entry) for entry in backends.every_measurement(backend_op, where)]
        times = None if args.no_times or op not in timed else time_op(timed[op], where)
        emit(op=op, plain=plain, measured=measured, times=times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
