"""Every family with a captured body, to the bit: `python -m tests.families.captured [types...]`.

Tapes take the place of a device's graphs. A family's tiny model is made twice; the body of one is captured and
replayed, that of the other runs its own code in the same buckets. Loss and every gradient of each batch must be equal,
bit by bit. Prints which families are captured and why others are not, and is 1 where anything differs, or raises with a
captured body alone.
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

from npu_trainer_kernels.patching import PATCHES
from tests import conftest  # sets what must be set before the package is imported
from tests.patching.whole import BodyTwins

from .compare import Values, _train, raised
from .tiny import VOCABULARY, batch, families, tiny_model

__all__ = ["Outcome", "batches", "captured"]

# The live tokens of each row. The first batch is seen, the second one is captured, the others are replayed.
_LENGTHS = ((24, 9, 12, 3), (11, 24, 3, 5), (4, 16, 24, 2), (12, 5, 3, 4), (9, 1, 12, 7))
# The same for two rows of 12 columns of families that are given more than text.
_SHORT = ((12, 9), (7, 12), (12, 5), (4, 12), (12, 1))
# The ops that are on by default, but for that of experts: its code for the CPU reads numbers on the host.
_OPS = tuple(op for op in PATCHES if op != "moe_experts")


@dataclass
class Outcome:
    """How a family fared.

    Attributes:
        share: the share of the calls of its body that were replayed.
        reasons: why the body ran its own code.
        wrong: what differs, or was raised with a captured body alone.
        unfit: why the model cannot be trained without a captured body either.
    """

    share: float = 0.0
    reasons: list[str] = field(default_factory=list)
    wrong: str = ""
    unfit: str = ""

    def __str__(self) -> str:
        if self.wrong or self.unfit:
            return f"WRONG: {self.wrong}" if self.wrong else f"not compared: {self.unfit}"
        reasons = "; ".join(self.reasons)
        if not self.share:
            return f"declined: {reasons}"
        return f"captured: {self.share:.0%} of calls" + (f"; not: {reasons}" if reasons else "")


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


def _own_experts(model: Any) -> None:
    """Has experts computed by products over all of them, which read no numbers on the host, in transformers' code."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_experts_implementation_internal", None):
            module.config._experts_implementation_internal = "batched_mm"


def _why_not(twins: BodyTwins) -> list[str]:
    """Returns why a body was not replayed, or not even asked for."""
    report = twins.kernels.report()
    declined = [each.reason for each in report.declined if each.op == "varlen_attention"]
    left = [each.reason for each in report.left_alone if each.op == "varlen_attention"]
    return list(twins.reasons) or declined or left


def captured(task: str, kind: str, checkpointed: bool = False) -> Outcome:
    """Trains a family's tiny model with a captured body and without; with `checkpointed` a checkpoint repeats its
    layers."""

    def prepare(model: Any) -> None:
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    outcome = Outcome()
    try:
        model = tiny_model(task, kind)
        _own_experts(model)
        plain = copy.deepcopy(model)
        prepare(plain)
        steps = [{**step, "use_cache": False} for step in batches(model)]
        for step in steps:
            _train(plain, copy.deepcopy(step))
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        outcome.unfit = raised(error)
        return outcome
    try:
        twins = BodyTwins(model, prepare, ops=_OPS)
        for i, step in enumerate(steps):
            found, values = (_train(each, copy.deepcopy(step)) for each in twins.both)
            different = _different(found, values)
            if different:
                outcome.wrong = f"batch {i}: {len(different)} of {len(values)} values differ: {different[0]}"
                break
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        outcome.wrong = raised(error)
        return outcome
    outcome.share = twins.replayed / max(twins.replayed + twins.bodies.eager, 1)
    outcome.reasons = _why_not(twins)
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
            table[task, "captured" if outcome.share else str(outcome)] += 1
        gc.collect()
    print(f"\n{sum(table.values())} families, {wrong} wrong; {time.monotonic() - started:.0f} s")
    for (task, what), count in sorted(table.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{count:4} {task}: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    assert conftest.DEVICE == "cpu", "the families are compared on the CPU"
    torch.set_num_threads(1)
    sys.exit(main())
