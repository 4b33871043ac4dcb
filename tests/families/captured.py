"""Every family with captured layers, to the bit: `python -m tests.families.captured [types...]`.

Tapes take the place of a device's graphs. A family's tiny model is made twice; the layers of one are captured and
replayed, those of the other run their own code on rows that are filled up to the same number of tokens. Loss and every
gradient of each batch must be equal, bit by bit. Prints which families are captured and why others are not, and is 1
where anything differs, or raises with captured layers alone.
"""

import argparse
import copy
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.audit import distance
from npu_trainer_kernels.support.rounding import Rounded
from tests import conftest  # sets what must be set before the package is imported

from .compare import Values, _train, raised
from .tiny import VOCABULARY, batch, families, tiny_model

__all__ = ["Outcome", "batches", "captured"]

# The live tokens of each row. The first batch is seen, the second one is captured, the others are replayed: 24 columns
# with up to 48 tokens, then 12 columns with up to 32.
_LENGTHS = (
    (24, 9, 12, 3), (11, 24, 3, 5), (4, 16, 24, 2), (1, 24, 14, 6), (12, 5, 3, 4), (4, 12, 8, 2), (9, 1, 12, 7),
    (24, 5, 7, 9),
)  # fmt: skip
# The same for two rows of 12 columns of families that are given more than text.
_SHORT = ((12, 9), (7, 12), (12, 5), (12, 10), (4, 12), (12, 1), (2, 12), (12, 11))
# The body reads the input of some layer, too (it keeps it for later layers), so that one more gradient is added to
# those of the layer, and in another order: held to what rounding does, as an op is.
_ADDED_IN_ANOTHER_ORDER = frozenset(("inkling2", "inkling2_text"))
# The ops that are on by default, but for that of experts: its code for the CPU reads numbers on the host.
_OPS = tuple(op for op in PATCHES if op != "moe_experts")


@dataclass
class Outcome:
    """How a family fared.

    Attributes:
        share: the share of the calls of layers that were replayed.
        seams: the seams of its layers, each number once.
        reasons: why layers ran their own code.
        rounded: whether values differ by no more than what rounding does, for a known reason.
        wrong: what differs, or was raised with captured layers alone.
        unfit: why the model cannot be trained without captured layers either.
    """

    share: float = 0.0
    seams: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    rounded: bool = False
    wrong: str = ""
    unfit: str = ""

    def __str__(self) -> str:
        if self.wrong or self.unfit:
            return f"WRONG: {self.wrong}" if self.wrong else f"not compared: {self.unfit}"
        reasons = "; ".join(self.reasons)
        if not self.share:
            return f"declined: {reasons or 'it has no layers that transformers could repeat by a checkpoint'}"
        seams = ", ".join(map(str, self.seams))
        how = ", within rounding" if self.rounded else ""
        return f"captured{how}: {self.share:.0%} of calls, seams: {seams}" + (f"; not: {reasons}" if reasons else "")


def batches(model: Any) -> Iterator[dict[str, Any]]:
    """Padded batches of other rows with the same number of tokens, and of another one."""
    given = batch(model)
    text = set(given) == {"input_ids", "labels"} and given["input_ids"].shape == given["labels"].shape
    generator = torch.Generator().manual_seed(4)
    for lengths in _LENGTHS if text else _SHORT:
        if text:
            # As long as the longest row, as collators make it.
            ids = torch.randint(3, VOCABULARY // 2, (len(lengths), max(lengths)), generator=generator)
        elif "input_ids" in given and given["input_ids"].shape == given["labels"].shape:
            ids = given["input_ids"]
        else:
            yield given
            continue
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        labels = (ids if text else given["labels"]).masked_fill(mask == 0, -100)
        yield {**given, "input_ids": ids, "attention_mask": mask, "labels": labels}


def _different(actual: Values, expected: Values) -> list[str]:
    return [
        name for name, value in actual.items()
        if (value is None) != (expected[name] is None)
        or (value is not None and not torch.equal(value.nan_to_num(7.0), expected[name].nan_to_num(7.0)))
    ]  # fmt: skip


def _within_rounding(model: Any, inputs: dict[str, Any], found: Values, own: Values) -> bool:
    """Whether values are no farther from a model's own than those of the model with every result rounded otherwise."""
    with Rounded(0, in_place=False):
        rounded = _train(model, copy.deepcopy(inputs))
    names = [name for name, value in own.items() if value is not None]
    return distance(*([each[name] for name in names] for each in (found, own, rounded))) <= 1


def _own_experts(model: Any) -> None:
    """Has experts computed by products over all of them, which read no numbers on the host, in transformers' code."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_experts_implementation_internal", None):
            module.config._experts_implementation_internal = "batched_mm"


def captured(task: str, kind: str, checkpointed: bool = False) -> Outcome:
    """Trains a family's tiny model with captured layers and without; with `checkpointed` a checkpoint repeats them."""
    outcome = Outcome()
    try:
        model = tiny_model(task, kind)
        _own_experts(model)
        other = copy.deepcopy(model)
        if checkpointed:
            for each in (model, other):
                each.gradient_checkpointing_enable({"use_reentrant": False})
        steps = [{**step, "use_cache": False} for step in batches(model)]
        plain = apply_npu_kernels(other, ops=_OPS, backend="torch", capture="on")
        plain.settings.layers._ready = lambda *call: ""
        expected = [_train(other, copy.deepcopy(step)) for step in steps]
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        outcome.unfit = raised(error)
        return outcome
    try:
        handle = apply_npu_kernels(model, ops=_OPS, backend="torch", capture="on")
        for i, (step, values) in enumerate(zip(steps, expected, strict=True)):
            found = _train(model, step)
            different = _different(found, values)
            if different and kind in _ADDED_IN_ANOTHER_ORDER and _within_rounding(other, step, found, values):
                outcome.rounded = True
            elif different:
                outcome.wrong = f"batch {i}: {len(different)} of {len(values)} values differ: {different[0]}"
                break
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        outcome.wrong = raised(error)
        return outcome
    layers = handle.settings.layers
    outcome.share = layers.replayed / max(layers.replayed + layers.eager, 1)
    outcome.reasons = list(layers.reasons)
    each = [
        found for mode in layers._modes.values() for spot in mode.buckets.values() for variants in spot.layers.values()
        for found in variants if found.pieces is not None
    ]  # fmt: skip
    outcome.seams = sorted({len(found.pieces.pieces) - 1 for found in each})
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families.captured", description=__doc__)
    parser.add_argument("only", nargs="*", help="model types; none: all")
    parser.add_argument("--checkpointed", action="store_true", help="a checkpoint repeats every layer")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    started = time.monotonic()
    table: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for task, kind in families():
        if options.only and kind not in options.only:
            continue
        outcome = captured(task, kind, options.checkpointed)
        print(f"{task} {kind}: {outcome}", flush=True)
        wrong += bool(outcome.wrong)
        if outcome.wrong or outcome.unfit:
            table[task, "wrong" if outcome.wrong else "not compared"] += 1
        else:
            how = "captured, within rounding" if outcome.rounded else "captured"
            table[task, how if outcome.share else str(outcome)] += 1
        gc.collect()
    print(f"\n{sum(table.values())} families, {wrong} wrong; {time.monotonic() - started:.0f} s")
    for (task, what), count in sorted(table.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{count:4} {task}: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    assert conftest.DEVICE == "cpu", "the families are compared on the CPU"
    torch.set_num_threads(1)
    sys.exit(main())
