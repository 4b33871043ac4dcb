"""The values that the options of every way in accept: ops, backends, reports, capture, slices.

The module imports no torch, so that `npu-kernels run` can refuse a wrong value at once, before it starts anything.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from .table import TABLE

__all__ = [
    "BACKENDS",
    "CAPTURE_MODES",
    "KERNEL_BACKENDS",
    "MODEL_OPS",
    "OPS",
    "REPORT_LENGTHS",
    "STRICT",
    "TILED_OP",
    "check_capture",
    "check_op",
    "check_ops",
    "check_report",
    "check_tiled_mlp",
    "did_you_mean",
    "has_kernels",
    "parse_override",
]

OPS = tuple(TABLE)
# Losses that belong to trainers, and the attention of generation: no module of a model that is trained computes them.
_OF_NO_MODULE = ("grpo_loss", "linear_divergence", "decode_attention")
MODEL_OPS = tuple(op for op in OPS if op not in _OF_NO_MODULE)
"""The ops that can be put into a model, which are the keys of `patching.PATCHES`."""
BACKENDS = ("triton", "torch", "vendor", "ascend-lowering")
# The backends that run this package's kernels.
KERNEL_BACKENDS = ("triton", "ascend-lowering")
STRICT = "strict"
REPORT_LENGTHS = ("short", "full")
# When `patching.layers` captures decoder layers.
CAPTURE_MODES = ("auto", "on", "off")
# The op of gated MLPs, which can compute slices of the tokens.
TILED_OP = "swiglu"


def did_you_mean(given: Iterable[object], names: Collection[str]) -> str:
    """Returns the end of a message that names what was probably meant: `; did you mean 'rms_norm'?`; empty if the given
    words resemble no name."""
    wrong = [word for word in given if isinstance(word, str) and word not in names]
    close = [match for word in wrong for match in difflib.get_close_matches(word.strip().lower(), names, n=1)]
    return f"; did you mean {', '.join(map(repr, dict.fromkeys(close)))}?" if close else ""


def check_ops(ops: Sequence[str] | None, name: str = "ops", kind: str = "sequence") -> None:
    """Raises `ValueError` unless `ops` is None or a non-empty sequence of ops of a model.

    Args:
        ops: the value.
        name: the argument, option or variable that contains it, which begins the message.
        kind: the word for the sequence in the message.
    """
    named = isinstance(ops, Collection) and not isinstance(ops, str) and len(ops) > 0
    if ops is not None and not (named and all(isinstance(op, str) and op in MODEL_OPS for op in ops)):
        words = [ops] if isinstance(ops, str) else ops if isinstance(ops, Collection) else ()
        raise ValueError(
            f"{name} must be a {kind} of {', '.join(MODEL_OPS)}, one at least; got {ops!r}"
            f"{did_you_mean(words, MODEL_OPS)}"
        )


def check_tiled_mlp(name: str, tokens: int, ops: Sequence[str] | None) -> None:
    """Raises `ValueError` for an invalid number of tokens, or for one without effect because `ops` lacks the MLP op."""
    if type(tokens) is not int or tokens < 0:
        raise ValueError(f"{name} must be a number of tokens, or 0 for all at once; got {tokens!r}")
    if tokens and ops is not None and TILED_OP not in ops:
        raise ValueError(f"{name}={tokens} needs {TILED_OP} among ops; got {ops!r}")


def check_capture(name: str, mode: object) -> None:
    """Raises `ValueError` unless `mode` says when layers are captured."""
    _check_word(name, mode, CAPTURE_MODES)


def check_report(name: str, length: object) -> None:
    """Raises `ValueError` unless `length` is a length of the report."""
    _check_word(name, length, REPORT_LENGTHS)


def _check_word(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{did_you_mean([value], allowed)}")


def has_kernels(op: str) -> bool:
    """Whether this package has kernels of an op."""
    return any(choice.backend == "triton" for order in TABLE[op].order.values() for choice in order)


def check_op(op: str, name: str = "backend") -> None:
    """Raises `ValueError` for an unknown op; the message begins with `name`."""
    if op not in TABLE:
        raise ValueError(f"{name}: unknown op {op!r}; the ops are {', '.join(OPS)}{did_you_mean([op], OPS)}")


def parse_override(text: str, name: str = "backend") -> Mapping[str, str]:
    """Parses `"torch"` or `"op=backend,op=backend"` to a mapping from op to backend. Raises `ValueError` for anything
    else; the message begins with `name`, the argument, option or variable that contains the text.

    `"triton"` without an op applies to all ops that have kernels; for other ops the table still decides. The word
    `strict` is not a backend: it makes the failure of a kernel raise an error (`backends.is_strict`).
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} must be 'torch' or 'op=backend,...'; got {text!r}")
    result: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part == STRICT:
            continue
        op, separator, backend = part.partition("=")
        if not separator:
            op, backend = "", op
        if backend not in BACKENDS:
            raise ValueError(
                f"{name} must be one of {', '.join(BACKENDS)}; got {backend!r}{did_you_mean([backend], BACKENDS)}"
            )
        if op:
            check_op(op, name)
        every = (each for each in OPS if backend not in KERNEL_BACKENDS or has_kernels(each))
        result.update({op: backend} if op else dict.fromkeys(every, backend))
    return result
