"""`docs/models.md`: what is served in each family and what is left alone, as the full run has seen it."""

import collections
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

from npu_trainer_kernels.patching import PATCHES

from .compare import Result
from .tiny import LEFT_OUT, families, model_class

__all__ = ["PAGE", "families_of", "page", "row", "version_of"]

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Models

What `apply_npu_kernels(model, ops=PATCHES)` serves in every causal and image-text family of transformers {version}, and
what it leaves as it is. `python -m tests.families --write` writes this page (`make test-families`). For each family it
makes a small model with random weights on the CPU, gives it text, and compares it with itself unpatched: loss and every
gradient, also with padding, under gradient checkpointing and through the head that TRL adds, logits, generated tokens,
and the model after `restore`. *Served* counts the modules in which an op ran; on a CPU `embedding`, `swiglu` and `rope`
are put in only when they are asked for by name. Towers for images and sound, which text does not reach, are not
counted. *Not compared* is what the family's own code cannot do, with what it raises unpatched.

The ops are {ops}.

| family | class | served | left alone, or not compared |
|---|---|---|---|
"""


def _name(task: str, kind: str) -> str:
    return f"{kind} ({task})" if task == "image-text" else kind


def _served(result: Result) -> str:
    count = collections.Counter(op for op, _ in result.ran)
    return ", ".join(f"{op} {count[op]}" for op in PATCHES if count[op]) or "nothing"


def _left(results: Sequence[Result]) -> str:
    """Reasons by op and class; what the whole model or op has comes without a class. Then stages that no op ran in."""
    report = results[-1].report
    if report is None:
        return "not patched: " + "; ".join(str(f) for f in results[-1].findings)
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in report.left_alone:
        kinds = reasons.setdefault((entry.op, entry.reason), [])
        if entry.kind and entry.kind not in kinds:
            kinds.append(entry.kind)
    lines = [f"{op}: {', '.join(kinds) or 'everywhere'}: {reason}" for (op, reason), kinds in reasons.items()]
    bodies = (site for site in report.sites if site.op == "varlen_attention" and site.form.proof.mixes)
    lines += [f"varlen_attention: {site.kind.__name__}: {site.form}" for site in bodies]
    # Without the place in the source.
    stages = {stage: raised.rpartition(" [")[0] for stage, raised in results[-1].left_out.items()}
    lines += [f"not compared: {stage}: {raised}" for stage, raised in stages.items()]
    return "<br>".join(lines).replace("|", "\\|").replace("\n", " ") or "nothing"


def row(results: Sequence[Result]) -> str:
    """A family's line of the page, from its comparison with every set of ops; the last one is all of them."""
    last = results[-1]
    cls = model_class(last.task, last.kind).__name__
    return f"| {_name(last.task, last.kind)} | {cls} | {_served(last)} | {_left(results)} |"


def page(rows: Iterable[str]) -> str:
    """The whole page."""
    left_out = "".join(f"- {kind}: {reason}.\n" for kind, reason in LEFT_OUT.items())
    head = _HEAD.format(version=transformers.__version__, ops=", ".join(f"`{op}`" for op in PATCHES))
    return (
        head
        + "\n".join(rows)
        + "\n\nNot among them, since they are not trained on tokens by themselves:\n\n"
        + left_out
    )


def families_of(text: str) -> list[str]:
    """The families that a page has a line for, in its order."""
    return re.findall(r"^\| (.+?) \| \w+ \|", text, re.MULTILINE)[1:]


def version_of(text: str) -> str | None:
    """The version of transformers that a page was written with."""
    found = re.search(r"family of transformers ([\w.]+),", text)
    return found.group(1) if found else None


def names() -> list[str]:
    """The families that a page written now would have."""
    return [_name(*family) for family in families()]
