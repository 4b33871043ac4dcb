"""What every family gets on the installed version of transformers: a column of
`npu_trainer_kernels/evidence/families.json`, by `python -m tests.families --sets`.

Nothing is compared, so that a family takes a second or two (`npu_trainer_kernels.gains`). Families whose default
configuration makes no small model, or one that cannot run, are looked at in the tiny model of `tiny`.
"""

import functools
import json
import multiprocessing
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

from npu_trainer_kernels.evidence.families import GAINS, PROMISES, Promises, Served, read_families
from npu_trainer_kernels.gains import look_at_family, look_at_model
from npu_trainer_kernels.patching import PATCHES

from .tiny import VARIANTS, families, model_class, tiny_model

__all__ = [
    "Column",
    "Found",
    "columns_of",
    "document",
    "look",
    "measured",
    "name_of",
    "text",
    "without_variants",
    "write",
]

ROOT = Path(__file__).parents[2]
# Gain -> results file, workload, and the providers without the gain and with it.
_WORTH = {
    "padding": ("2026-11-22-nvidia-h200-sixth-round-steps.json", "grpo-trl",
                "qwen3-0.6b 8x(128+..4096 exponential), 2 a prompt", "flag-padded", "flag"),
    "prompts": ("2026-11-22-nvidia-h200-sixth-round-steps.json", "grpo-trl",
                "qwen3-4b 8x(2048+..1024 exponential), 8 a prompt lora 16", "flag-unshared", "flag"),
    "capture": ("2026-11-28-nvidia-h200-seventeenth-round-runs.json", "grpo-trl",
                "qwen3-0.6b 16x(..256+..1024 exponential), 8 a prompt", "flag-eager", "flag"),
    "rollouts": ("2026-11-26-nvidia-h100-sixteenth-round-rollouts.json", "completions",
                 "qwen3-0.6b 8x(64..128+512)", "generate", "steps"),
}  # fmt: skip
_NONE = "this version serves less of it"
# The reasons of a small model whose code does not run.
_FAILED = re.compile("no miniature of it can be made|a small model of it raises|its small model has no weights")


@dataclass(frozen=True)
class Found:
    """What one family gets on one version.

    Attributes:
        cls: the name of its class.
        served: what is served.
        default: whether the small model of its default configuration gets it.
    """

    cls: str
    served: Served
    default: bool = True


# By family what was found; families that a version does not have are not there.
Column = dict[str, Found]


def name_of(task: str, kind: str) -> str:
    """A family's name in the file."""
    return f"{kind} ({task})" if task == "image-text" else kind


def without_variants() -> Iterator[tuple[str, str]]:
    """Every (task, model type)."""
    return (family for family in families() if family[1] not in VARIANTS)


def look(family: tuple[str, str], steps: bool = True) -> tuple[str, Found]:
    """What one family gets, with its name; without `steps` not what is captured and generated."""
    task, kind = family
    torch.set_num_threads(1)
    cls = model_class(task, kind).__name__
    # What is captured and generated of a multimodal model is seen in its text family.
    gains = tuple(GAINS) if steps and task == "causal" else ("padding", "prompts")
    try:
        served = look_at_family(kind, cls, gains)
    except Exception:  # noqa: BLE001 - its default configuration makes no model
        served = None
    if served is None or any(_FAILED.match(why) for reasons in served.why.values() for why in reasons):
        other = look_at_model(tiny_model(task, kind), gains)
        if served is None or served.less_than(other):
            return name_of(task, kind), Found(cls, other, default=False)
    return name_of(task, kind), Found(cls, served)


def measured() -> dict[str, dict[str, Any]]:
    """The figures of each gain, from the results files."""
    found = {}
    for gain, (name, op, shape, without, provider) in _WORTH.items():
        file = ROOT / "benchmarks" / "results" / name
        data = json.loads(file.read_text())
        ms = {row["provider"]: row["ms"] for row in data["rows"] if (row["op"], row["shape"]) == (op, shape)}
        medians = {who: of["median"] if isinstance(of, dict) else of for who, of in ms.items()}
        device = data["meta"]["device"]["name"].removeprefix("NVIDIA ").partition(" ")[0]
        found[gain] = {
            "file": f"benchmarks/results/{name}", "op": op, "shape": shape, "without": without, "provider": provider,
            "without_ms": round(medians[without], 1), "ms": round(medians[provider], 1), "on": f"an {device}",
        }  # fmt: skip
    return found


def columns_of(promises: Promises) -> dict[str, Column]:
    """The columns that a file has."""
    return {
        version: {
            name: Found(family.cls, _all_known(served), family.default)
            for name, family in promises.families.items()
            if (served := family.by_version[version]) is not None
        }
        for version in promises.versions
    }


def _all_known(served: Served) -> Served:
    """The same with a reason for each gain that every column looks at and no version had when the file was written."""
    lacking = {"padding", "prompts"} - served.gains
    return Served(served.ops, served.gains, {**dict.fromkeys(lacking, frozenset({_NONE})), **served.why})


def document(columns: Mapping[str, Column], beside: Mapping[str, str]) -> dict[str, Any]:
    """The content of the file, from a column for each version."""
    versions = sorted(columns, key=Version)
    names = sorted({name for column in columns.values() for name in column})
    rows: dict[str, Any] = {}
    lacks: dict[str, dict[str, Any]] = {version: {} for version in versions}
    for name in names:
        there = {version: columns[version][name] for version in versions if name in columns[version]}
        counts = {what: max(found.served.count(what) for found in there.values()) for what in (*PATCHES, *GAINS)}
        last = there[max(there, key=Version)]
        rows[name] = {
            "class": last.cls,
            "ops": {op: counts[op] for op in PATCHES if counts[op]},
            "gains": [gain for gain in GAINS if counts[gain]],
            **({} if last.default else {"default": False}),
        }
        for version in versions:
            if version not in there:
                lacks[version][name] = None
                continue
            served = there[version].served
            less = {
                what: {"kinds": served.count(what), "why": sorted(served.reasons(what)) or [_NONE]}
                for what, count in counts.items() if served.knows(what) and served.count(what) < count
            }  # fmt: skip
            if less:
                lacks[version][name] = less
    return {"beside": dict(beside), "worth": measured(), "lacks": lacks, "families": rows}


def text(whole: Mapping[str, Any]) -> str:
    """The text of the file: a line for each family, so that a change of one is a change of its line."""

    def lines(of: Mapping[str, Any], indent: str) -> str:
        rows = (f"{indent}  {json.dumps(name)}: {json.dumps(row)}" for name, row in of.items())
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}" if of else "{}"

    lacks = (f"    {json.dumps(version)}: {lines(of, '    ')}" for version, of in whole["lacks"].items())
    return (
        f'{{\n  "beside": {json.dumps(whole["beside"])},\n  "worth": {lines(whole["worth"], "  ")},\n'
        '  "lacks": {\n' + ",\n".join(lacks) + f'\n  }},\n  "families": {lines(whole["families"], "  ")}\n}}\n'
    )


def _newest(known: Mapping[str, str]) -> dict[str, str]:
    """The newest versions of other packages that a column was made with."""
    found = {name: metadata.version(name).partition("+")[0] for name in ("torch", "trl")}
    return {name: max(known.get(name, version), version, key=Version) for name, version in found.items()}


def write(only: Iterable[str], jobs: int, steps: bool = True) -> None:
    """Writes the installed version's column; with `only`, of it the lines of these model types. Without `steps` nothing
    runs, and what is captured and generated is taken from the other columns."""
    started, only = time.monotonic(), set(only)
    chosen = [family for family in without_variants() if not only or family[1] in only]
    promises = read_families() if PROMISES.exists() else Promises((), {}, {}, {})
    columns = columns_of(promises)
    beside = _newest(promises.beside)
    before, column = columns.get(transformers.__version__, {}), Column()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for name, found in pool.imap(functools.partial(look, steps=steps), chosen):
            column[name] = found
            then = before.get(name)
            same = then is not None and not (found.served.less_than(then.served) or then.served.less_than(found.served))
            said = [f"{op} {count}" for op, count in found.served.ops.items()] + sorted(found.served.gains)
            print(f"{'same' if same else 'new '} {name}: {', '.join(said)}", flush=True)
            # Each time, since a run of all families may be ended before it has all of them.
            columns[transformers.__version__] = {**before, **column}
            PROMISES.write_text(text(document(columns, beside)))
    if not only:
        columns[transformers.__version__] = column  # without families that the version does not have any more
        PROMISES.write_text(text(document(columns, beside)))
    print(f"{len(column)} families; {time.monotonic() - started:.0f} s")
