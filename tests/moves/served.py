"""What is served of a family's tiny model in this process, as plain data, and how two of these differ."""

import contextlib
import hashlib
import io
import re
import warnings
from collections import Counter
from typing import Any

import torch
import transformers

from tests import conftest  # isort: skip  # sets what must be set before the package is imported

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES, Report
from tests.families.captured import captured
from tests.families.compare import Values, _padded, _train, raised
from tests.families.rollouts import generated
from tests.families.tiny import batch, tiny_model

__all__ = ["Facts", "different", "lost", "served"]

Facts = dict[str, Any]


def _digest(values: Values) -> str:
    found = hashlib.sha256()
    for value in values.values():
        found.update(b"-" if value is None else value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _step(model: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    """The bits of the loss, and of all gradients, of a padded batch; of a whole one where a family takes no other."""
    try:
        values = _padded(model, inputs)
    except Exception:  # noqa: BLE001 - a family that takes no padding is trained without
        values = _train(model, inputs)
    loss = values["loss"]
    assert loss is not None
    return float(loss).hex(), _digest(values)


def _of_report(report: Report) -> Facts:
    modules: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for site in report.sites:
        key = f"{site.op} {site.kind.__name__}"
        key += f": {site.form}" if site.op == "varlen_attention" else ""
        modules[key] += len(site.paths)
        ran[key] += site.ran
    return {
        "modules": dict(modules),
        "ran": dict(ran),
        "left": sorted({f"{each.op} {each.kind}: {each.reason}" for each in report.left_alone}),
        "declined": sorted({f"{each.op} {each.kind}: {each.reason}" for each in report.declined}),
    }


def served(task: str, kind: str, ops: tuple[str, ...] = PATCHES, beside: bool = False, own: bool = False) -> Facts:
    """Trains the family's tiny model for one step, without the kernels and with some of them.

    Args:
        task, kind: the family.
        ops: the ops to apply.
        beside: whether a captured body and rollouts are tried, too.
        own: whether experts run the code of their own file, and not transformers' shared one.

    Returns:
        `plain`, `patched`: the bits of loss and gradients; `modules`, `ran`: by op and class, how many modules it
        replaced and how many calls it served; `left`, `declined`: reasons; `beside`: what became of a captured body
        and rollouts; `failed`: why there is nothing of this; `broken`: how the kernels break it.
    """
    assert conftest.DEVICE == "cpu"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    # transformers' documentation of renamed arguments complains by print.
    with contextlib.redirect_stdout(io.StringIO()):
        return _served(task, kind, ops, beside, own)


def _served(task: str, kind: str, ops: tuple[str, ...], beside: bool, own: bool) -> Facts:
    try:
        model = tiny_model(task, kind)
        inputs = batch(model)
        if own:
            model.config._experts_implementation = "eager"
        plain = _step(model, inputs)
    except Exception as error:  # noqa: BLE001 - a family that cannot be trained is listed
        return {"failed": raised(error)}
    kernels = apply_npu_kernels(model, ops=ops)
    try:
        patched = _step(model, inputs)
    except Exception as error:  # noqa: BLE001 - and so is one that the kernels break
        return {"plain": plain, "broken": raised(error)}
    tried = {"capture": str(captured(task, kind)), "rollouts": str(generated(kind))} if beside else {}
    return {"plain": plain, "patched": patched, **_of_report(kernels.report()), "beside": tried}


def lost(before: Facts, after: Facts) -> dict[str, list[str]]:
    """What is served before a move and not after it: by op and class, the reasons that the report has after it.

    A reason that was there before explains nothing.
    """
    found = {}
    known = {*before["left"], *before["declined"]}
    said = [each for each in (*after["left"], *after["declined"]) if each not in known]
    # A body says in its form who computes padding.
    said += [key for key in after["modules"] if key.startswith("varlen_attention") and key not in before["modules"]]
    for key, count in before["modules"].items():
        if after["modules"].get(key, 0) < count or after["ran"].get(key, 0) < before["ran"][key]:
            found[key] = [each for each in said if each.startswith(key.partition(" ")[0] + " ")]
    for name, outcome in before["beside"].items():
        if after["beside"][name] != outcome:
            found[name] = [after["beside"][name]]  # it has its reason
    return found


def different(before: Facts, after: Facts, same_gradients: bool) -> str | None:
    """What is wrong with a move, or with what the kernels make of it, beside losses; None: nothing."""
    for facts in (before, after):
        if "broken" in facts:
            return f"the kernels break it: {facts['broken']}"
    if "failed" in before or "failed" in after:
        # A moved source has other lines.
        same = len({re.sub(r" \[[^\[]*:\d+\]$", "", str(facts.get("failed"))) for facts in (before, after)}) == 1
        return None if same else f"it fails otherwise: {after.get('failed')}"
    count = 2 if same_gradients else 1
    if before["plain"][:count] != after["plain"][:count]:
        return "the moved source computes something else"
    whole = not lost(before, after) and before["modules"] == after["modules"]
    if whole and before["patched"][:count] != after["patched"][:count]:
        return "the same is served, with other results"
    return None
