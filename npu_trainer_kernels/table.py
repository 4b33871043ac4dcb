"""The one table of ops, `table.json`: which there are, the forms in which they run, the order of backends on each kind
of device, where a model keeps its own code, and the evidence for each of these.

A row of the file, under `ops`:

    forms          names in `workloads.OPS`: the op by itself, or together with its projection
    head           it forms no logits of all tokens: worth having wherever it runs (default false)
    before_torch   by kind of device, the backends that are tried before torch, each a `backend` and why (`because`)
    not_measured   by kind of device, backends that run there and have no evidence: they are chosen by name alone, and
                   a model keeps its own code
    torch          by kind of device, why torch ends the list, where that is not what is said of all ops
    keeps_plain    by kind of device, why a model keeps its own code unless the op is asked for by name
    keeps_fused    the same for modules whose own code is one operator of PyTorch's
    vendor         torch_npu's operators for it, the calls that they cover, and what they do not repeat bit by bit
    remark         for the reader: what the evidence does not say

Evidence is a sentence, in which `{name}` stands for one of `sentences`; or what was measured, as figures of a results
file (`python -m benchmarks --evidence FILE` writes them), of which the sentence is made here. `torch` says of each kind
of device why torch ends its list, and `unmeasured` where models keep all of their code but the head.

It is read once, and needs no torch: `npu-kernels doctor` reads it where torch is broken.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FILE", "FORMS", "TABLE", "Choice", "Measured", "Op", "Vendor", "op_of"]

FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Measured:
    """Milliseconds of forward and backward, of ours and of plain PyTorch.

    Attributes:
        file: the results, from the root of the repository.
        form, shape, dtype: the row.
        ms, plain_ms: medians.
        on: the device, with its article.
        plain: whose time `plain_ms` is: of the op's plain reference, or of a provider of the file by this name.
    """

    file: str
    form: str
    shape: str
    dtype: str
    ms: float
    plain_ms: float
    on: str
    plain: str = "reference"

    @property
    def row(self) -> str:
        return f"forward and backward, {self.form} {self.shape} {self.dtype}"


@dataclass(frozen=True)
class Choice:
    """A backend, or the model's own code, and the evidence that puts it in its place."""

    backend: str
    evidence: str
    measured: Measured | None = None


@dataclass(frozen=True)
class Vendor:
    """What torch_npu has for an op.

    Attributes:
        operators: their names in `torch.ops.npu`.
        covers: the calls that they cover, in words; the functions `uncovered_*` of `vendor` decide.
        not_repeatable: what they do, but not with the same bits every time: done by the next backend unless they were
            asked for by name.
    """

    operators: tuple[str, ...]
    covers: str
    not_repeatable: str | None


@dataclass(frozen=True)
class Op:
    """A row.

    Attributes:
        forms: names in `workloads.OPS`.
        order: by kind of device (`device.KINDS`), the backends; the first that can run there is used. Behind torch
            stand those that were not measured.
        keeps_plain: by kind of device, why a model keeps its own code there.
        keeps_fused: the same for modules whose own code is one operator of PyTorch's.
        vendor: torch_npu's operators, if there are any.
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


def _op(row: dict[str, Any], whole: dict[str, Any]) -> Op:
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
    return Op(
        forms=tuple(row["forms"]),
        order=order,
        keeps_plain={kind: _plain(because, sentences) for kind, because in plain.items()},
        keeps_fused={kind: _plain(because, sentences) for kind, because in row.get("keeps_fused", {}).items()},
        vendor=vendor and Vendor(tuple(vendor["operators"]), vendor["covers"], vendor.get("not_repeatable")),
    )


def _read() -> dict[str, Op]:
    whole = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: _op(row, whole) for name, row in whole["ops"].items()}


TABLE = _read()
_OP_OF = {form: name for name, op in TABLE.items() for form in op.forms}
FORMS = tuple(_OP_OF)
"""Of all ops, in the table's order."""


def op_of(form: str) -> str:
    """The op that a form is of."""
    return _OP_OF[form]
