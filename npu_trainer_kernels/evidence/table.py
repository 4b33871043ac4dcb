"""The one table of ops, `table.json`: the ops, the forms in which they run, the order of backends on each kind of
device, the devices on which a model keeps its own code, and the evidence for each of these.

A row of the file, under `ops`:

    forms          names in `descriptions.FORMS`: the op by itself, or together with its projection
    head           whether it avoids the logits of all tokens, and is useful wherever it runs (default false)
    before_torch   by kind of device, the backends to try before torch, each with `backend` and `because`, the reason
    not_measured   by kind of device, backends without evidence: they are chosen by name alone, and a model keeps its
                   own code
    torch          by kind of device, the reason for torch at the end, if it differs from the one of all ops
    keeps_plain    by kind of device, the reason why a model keeps its own code unless the op is asked for by name
    keeps_fused    the same for modules whose own code is one PyTorch operator
    vendor         torch_npu's operators for it, the calls that they cover, and results that they do not repeat exactly
    remark         additional remarks for the reader

Evidence is a sentence, in which `{name}` inserts one of `sentences`, or a measurement from a results file (`python -m
benchmarks --evidence FILE` writes it), from which this module makes the sentence. By kind of device, the top-level
`torch` has the reason for torch at the end, and `unmeasured` why models keep all of their code except the head.

The module reads the table once and does not import torch, because `npu-kernels doctor` needs it if torch is broken.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FILE", "FORM_NAMES", "TABLE", "Choice", "Measured", "OpRow", "Vendor", "op_of"]

FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Measured:
    """A measurement: milliseconds of the op and of plain PyTorch.

    Attributes:
        file: the results file, relative to the root of the repository.
        form, shape, dtype: the row of the file.
        ms, plain_ms: the medians of the op and of plain PyTorch.
        on: the device, with its article.
        plain: the implementation that `plain_ms` belongs to: the op's reference, or a provider of the file.
        mode: what was timed: `"both"` (forward and backward), or `"forward"`, for an op without gradients.
    """

    file: str
    form: str
    shape: str
    dtype: str
    ms: float
    plain_ms: float
    on: str
    plain: str = "reference"
    mode: str = "both"

    @property
    def row(self) -> str:
        return f"{'forward and backward' if self.mode == 'both' else self.mode}, {self.form} {self.shape} {self.dtype}"


@dataclass(frozen=True)
class Choice:
    """A backend, or the model's own code, and the evidence for its place in the list."""

    backend: str
    evidence: str
    measured: Measured | None = None


@dataclass(frozen=True)
class Vendor:
    """The operators of torch_npu for an op.

    Attributes:
        operators: the names of the operators in `torch.ops.npu`.
        covers: the calls that they cover, in words; the functions `uncovered_*` of `vendor` decide.
        not_repeatable: the result whose bits differ every time; the next backend computes it unless a user named them.
    """

    operators: tuple[str, ...]
    covers: str
    not_repeatable: str | None


@dataclass(frozen=True)
class OpRow:
    """A row of the table.

    Attributes:
        forms: names in `descriptions.FORMS`.
        order: by kind of device (`device.KINDS`), the backends; the first one that can run there is used.
        keeps_plain: by kind of device, the reason why a model keeps its own code.
        keeps_fused: the same for modules whose own code is one PyTorch operator.
        vendor: torch_npu's operators, or None.
    """

    forms: tuple[str, ...]
    order: dict[str, tuple[Choice, ...]]
    keeps_plain: dict[str, Choice]
    keeps_fused: dict[str, Choice]
    vendor: Vendor | None


def _ours(backend: str, because: Any, sentences: dict[str, str]) -> Choice:
    if isinstance(because, str):
        return Choice(backend, because.format(**sentences))
    found = Measured(**because)
    plain = "plain PyTorch" if found.plain == "reference" else found.plain
    said = f"{found.ms:g} ms against {found.plain_ms:g} ms of {plain}, {found.row} on {found.on} ({found.file})"
    return Choice(backend, said, found)


def _plain(because: Any, sentences: dict[str, str]) -> Choice:
    if isinstance(because, str):
        return Choice("plain", because.format(**sentences))
    found = Measured(**because)
    said = (
        f"the model's own code is as fast on {found.on}: {found.plain_ms:g} ms against {found.ms:g} ms, {found.row} "
        f"({found.file})"
    )
    return Choice("plain", said, found)


_NOT_MEASURED = "not measured on this kind of device"


def _op(row: dict[str, Any], whole: dict[str, Any]) -> OpRow:
    before, new, vendor = row["before_torch"], row.get("not_measured", {}), row.get("vendor")
    sentences = whole["sentences"]
    order = {}
    for kind, last in {**whole["torch"], **row.get("torch", {})}.items():
        ours = (_ours(choice["backend"], choice["because"], sentences) for choice in before.get(kind, ()))
        others = (Choice(backend, _NOT_MEASURED) for backend in new.get(kind, ()))
        last = (
            f"no other backend was measured on this kind of device: {', '.join(new[kind])} by name"
            if kind in new
            else last
        )
        order[kind] = (*ours, _ours("torch", last, sentences), *others)
    unmeasured = {**whole["unmeasured"], **dict.fromkeys(new, _NOT_MEASURED)}
    plain = {**({} if row.get("head", False) else unmeasured), **row.get("keeps_plain", {})}
    return OpRow(
        forms=tuple(row["forms"]),
        order=order,
        keeps_plain={kind: _plain(because, sentences) for kind, because in plain.items()},
        keeps_fused={kind: _plain(because, sentences) for kind, because in row.get("keeps_fused", {}).items()},
        vendor=vendor and Vendor(tuple(vendor["operators"]), vendor["covers"], vendor.get("not_repeatable")),
    )


def _read() -> dict[str, OpRow]:
    whole = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: _op(row, whole) for name, row in whole["ops"].items()}


TABLE = _read()
_OP_OF = {form: name for name, op in TABLE.items() for form in op.forms}
FORM_NAMES = tuple(_OP_OF)
"""The forms of all ops, in the table's order."""


def op_of(form: str) -> str:
    """Returns the op of a form."""
    return _OP_OF[form]
