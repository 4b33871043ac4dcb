"""Finds which formula a model's rotation computes, by running it: `rope_form(apply_rotary_pos_emb)`.

The function is called with random heads and tables, in fp32, in bf16 and in bf16 with fp32 tables, at several head
sizes, with one and several sequences in the tables, and its results are compared bit for bit with `ops.rope` in every
form. The names of its parameters tell how to call it; with other names, every way is tried:

    f(q, k, cos, sin, unsqueeze_dim=1)      Llama and most others, position_ids=None before unsqueeze_dim in some
    f(x, cos, sin, unsqueeze_dim=1)         Gemma 3n and 4
    f(x, sin, cos)                          GPT-J
    f(q, k, cos, sin)                       vision towers, of `[T, H, D]` and tables `[T, R]`
    f(xq, xk, freqs_cis)                    Llama 4, DeepSeek-V2: cosines and sines as complex numbers

At a call, `rotation_call` checks that the form covers it, and `rotate` computes it.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...ops.checks import FLOATS
from ...ops.rope import CASTINGS, PAIRS, TABLES, Rotation, rope_of_checked, rope_reference, rotation
from ..bound_forwards import own_function
from ..patch import PROBE_ERRORS
from ..probe import trace_of_function

__all__ = ["RopeForm", "RotationCall", "form_of_call", "rope_form", "rotate", "rotates", "rotation_call",
           "rotations_of"]  # fmt: skip

_QUERIES, _KEYS, _SINGLE = ("q", "xq"), ("k", "xk"), ("x", "tensor", "hidden_states")
_COMPLEX = "freqs_cis"
_FLOATS = frozenset(FLOATS)


@dataclass(frozen=True)
class RopeForm:
    """The options of `ops.rope` that compute a function, and how the function is called.

    Attributes:
        pairs, tables, casting: options of `ops.rope`.
        names: the names of its tensor parameters, in order.
        roles: the role of each: `"q"`, `"k"`, `"cos"`, `"sin"` or `"freqs"`.
        layouts: the calls that it supports without `unsqueeze_dim`: (number of dimensions of q, dimension of the heads
            after a batch dimension is put before three).
        unsqueezes: whether it has a parameter for the dimension of the heads.
        dimension: the name of this parameter.
        partial: whether tables may be narrower than heads.
    """

    pairs: str
    tables: str
    casting: str
    names: tuple[str, ...]
    roles: tuple[str, ...]
    layouts: tuple[tuple[int, int], ...] = ((4, 1),)
    unsqueezes: bool = False
    partial: bool = False
    dimension: str = "unsqueeze_dim"

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of `ops.rope`."""
        return {"pairs": self.pairs, "tables": self.tables, "casting": self.casting}

    @functools.cached_property
    def heads_at(self) -> dict[int, int]:
        """`layouts` as a dictionary."""
        return dict(self.layouts)

    def __str__(self) -> str:
        parts = [self.pairs, f"tables {self.tables}", f"casting {self.casting}"]
        return ", ".join([*parts, *(["partial"] if self.partial else [])])


class RotationCall(NamedTuple):
    """The arguments of a call in the shapes of `ops.rope`."""

    q: torch.Tensor
    k: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
    one_sequence: bool  # the function was called without a batch dimension


# ---------------------------------------------------------------------------------------------------------------------
# At a call
# ---------------------------------------------------------------------------------------------------------------------


def rotation_call(form: RopeForm, args: tuple[Any, ...], named: Mapping[str, Any]) -> RotationCall | None:
    """Returns the call `function(*args, **named)` of a function of this form; None where the form does not cover it."""
    heads = None
    if named:
        given = dict(zip(form.names, args, strict=False))
        for name, value in named.items():
            if name in form.names and name not in given:
                given[name] = value
            elif name == form.dimension and form.unsqueezes and value in (1, 2):
                heads = value
            elif name != "position_ids" or value is not None:
                return None
        if len(args) > len(form.names) or len(given) != len(form.names):
            return None
        args = tuple([given[name] for name in form.names])
    if len(args) != len(form.roles):
        return None
    for value in args:
        if not isinstance(value, torch.Tensor):
            return None
    tensors = dict(zip(form.roles, args, strict=True))
    q, k = tensors["q"], tensors.get("k")
    if "freqs" in tensors:
        freqs = tensors["freqs"]
        if freqs.dtype != torch.complex64:
            return None
        cos, sin = freqs.real, freqs.imag
    else:
        cos, sin = tensors["cos"], tensors["sin"]
    rank = q.dim()
    if heads is None:
        heads = form.heads_at.get(rank)
    if rank == 3:
        q, k, cos, sin = (None if t is None else t.unsqueeze(0) for t in (q, k, cos, sin))
    if heads is None or not _covers(form, q, k, cos, sin, heads):
        return None
    return RotationCall(q, k, cos, sin, heads, rank == 3)


def _covers(
    form: RopeForm, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> bool:
    """Whether `ops.rope` takes these tensors and returns the function's result."""
    of_q, of_cos = q.shape, cos.shape
    if len(of_q) != 4 or len(of_cos) != 3 or sin.shape != of_cos or cos.requires_grad or sin.requires_grad:
        return False
    dtype = q.dtype
    if dtype not in _FLOATS or cos.dtype not in _FLOATS or sin.dtype != cos.dtype:
        return False
    batch, tokens, size, width = of_q[0], of_q[3 - heads], of_q[3], of_cos[2]
    rotated = 2 * width if form.tables == "pair" else width
    if of_cos[0] not in (1, batch) or of_cos[1] != tokens or rotated % 2 or not 0 < rotated <= size:
        return False
    if rotated < size and not form.partial:
        return False
    if k is None:
        return True
    of_k = k.shape
    if k.dtype != dtype or len(of_k) != 4:
        return False
    return of_k[0] == batch and of_k[3 - heads] == tokens and of_k[3] == size


def form_of_call(form: RopeForm, call: RotationCall) -> Rotation:
    """Returns the rotation that `ops.rope` computes for a call."""
    return rotation(heads=call.heads, **form.options)


def rotate(form: RopeForm, call: RotationCall, backend: str | None = None) -> Any:
    """Computes the function's result with `ops.rope`."""
    # `rotation_call` has made the checks of `rope`.
    q, k = rope_of_checked(call.q, call.k, call.cos, call.sin, form_of_call(form, call), backend)
    if call.one_sequence:
        q, k = q.squeeze(0), None if k is None else k.squeeze(0)
    return (q, k) if "k" in form.roles else q


# ---------------------------------------------------------------------------------------------------------------------
# Recognition
# ---------------------------------------------------------------------------------------------------------------------


def rotations_of(config: Any) -> tuple[RopeForm, ...]:
    """Returns the forms of the rotating functions in the code of a config's causal language model, or of its text part;
    empty where transformers has no such code, or no form covers it."""
    from transformers import AutoModel, AutoModelForCausalLM

    mappings: tuple[Any, ...] = AutoModelForCausalLM._model_mapping, AutoModel._model_mapping
    for part, mapping in itertools.product((config, config.get_text_config()), mappings):
        if type(part) in mapping:
            kind = mapping[type(part)]  # a tuple where a config has a model for each of its sizes
            space = vars(importlib.import_module((kind[0] if isinstance(kind, tuple) else kind).__module__))
            named = [own_function(f) for name, f in space.items() if rotates(name) and "vision" not in name]
            found = tuple(form for f in named if f is not None and (form := rope_form(f)) is not None)
            if found:
                return tuple(dict.fromkeys(found))
    return ()


def rotates(name: str) -> bool:
    """Whether a function's name suggests that it rotates."""
    return any(part in name for part in ("rotary", "rope"))


def rope_form(function: Callable[..., Any]) -> RopeForm | None:
    """Returns the form of `ops.rope` that equals the function bit for bit, or None."""
    return _rope_form(function) if trace_of_function(function) is None else None


@functools.cache
def _rope_form(function: Callable[..., Any]) -> RopeForm | None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    heads = next((each for each in parameters.values() if type(each.default) is int and each.default in (1, 2)), None)
    found = (_form_of_roles(function, tuple(parameters), roles, heads) for roles in _roles(parameters))
    return next((form for form in found if form is not None), None)


def _form_of_roles(
    function: Callable[..., Any], parameters: tuple[str, ...], roles: tuple[str, ...], heads: inspect.Parameter | None
) -> RopeForm | None:
    """Returns the form of a function whose first parameters have these roles; `heads` is its parameter for the
    dimension of the heads."""
    names, unsqueezes = parameters[: len(roles)], heads is not None
    layouts = ((4, 1), (4, 2), (3, 2)) if heads is None else ((4, heads.default),)
    for pairs, tables, layout in itertools.product(PAIRS, TABLES, layouts):
        if (pairs, tables) == ("regrouped", "each") or ("freqs" in roles and tables != "pair"):
            continue
        form = RopeForm(pairs, tables, CASTINGS[0], names, roles, (layout,), unsqueezes)
        form = form if heads is None else replace(form, dimension=heads.name)
        # All castings are the same in fp32.
        if not _has_bits(function, form, 32, 32, (torch.float32, torch.float32)):
            continue
        for casting in CASTINGS:
            form = replace(form, casting=casting)
            if all(_has_bits(function, form, size, size, dtypes) for size, dtypes in _cases(form)):
                return _with_all_calls(function, form, layouts)
    return None


def _with_all_calls(function: Callable[..., Any], form: RopeForm, layouts: tuple[tuple[int, int], ...]) -> RopeForm:
    """Adds the function's other calls to the form: one sequence alone, and tables narrower than heads."""
    others = (replace(form, layouts=(layout,)) for layout in layouts if layout not in form.layouts)
    also = tuple(
        other.layouts[0] for other in others if all(_has_bits(function, other, n, n, d) for n, d in _cases(other))
    )
    form = replace(form, layouts=form.layouts + also)
    parts = itertools.product(((32, 16), (128, 64), (256, 64), (128, 96)), _dtypes(form))
    return replace(form, partial=all(_has_bits(function, form, size, part, dtypes) for (size, part), dtypes in parts))


def _roles(parameters: Mapping[str, inspect.Parameter]) -> tuple[tuple[str, ...], ...]:
    """Returns the roles that a function's first parameters may have: those that their names say, else every one."""
    names = tuple(parameters)
    if (said := _roles_said(names)) is not None:
        return (said,)
    needed = [name for name, each in parameters.items() if each.default is each.empty]
    return _ROLES.get(len(needed), ()) if names[: len(needed)] == tuple(needed) else ()


_ROLES = {
    3: (("q", "cos", "sin"), ("q", "sin", "cos"), ("q", "k", "freqs")),
    4: (("q", "k", "cos", "sin"), ("q", "k", "sin", "cos")),
}


def _roles_said(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Returns the roles of a function's first parameters, by their names."""
    if not names:
        return None
    paired = len(names) > 1 and names[0] in _QUERIES and names[1] in _KEYS
    if not paired and names[0] not in _SINGLE:
        return None
    first = ("q", "k") if paired else ("q",)
    tables = names[len(first) : len(first) + 2]
    if tables in (("cos", "sin"), ("sin", "cos")):
        return (*first, *tables)
    return (*first, "freqs") if tables[:1] == (_COMPLEX,) else None


def _dtypes(form: RopeForm) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Returns the dtypes of heads and of tables."""
    mixed = (torch.float32, torch.float32), (torch.bfloat16, torch.float32)
    return mixed if "freqs" in form.roles else ((torch.bfloat16, torch.bfloat16), *mixed)


def _cases(form: RopeForm) -> Iterator[tuple[int, tuple[torch.dtype, torch.dtype]]]:
    return itertools.product((32, 64, 96, 128, 256), _dtypes(form))


def _has_bits(
    function: Callable[..., Any], form: RopeForm, size: int, rotated: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> bool:
    """Whether the function equals the form for heads of `size` of which `rotated` elements are rotated."""
    ways: list[tuple[int, int, dict[str, int]]] = [(rank, heads, {}) for rank, heads in form.layouts]
    if form.unsqueezes:
        ways += [(4, heads, {form.dimension: heads}) for heads in (1, 2)]
    shared_tables = itertools.product(ways, (False, True))
    return all(_same_bits(function, form, *way, size, rotated, dtypes, shared) for way, shared in shared_tables)


def _same_bits(
    function: Callable[..., Any], form: RopeForm, rank: int, heads: int, named: dict[str, int], size: int, rotated: int,
    dtypes: tuple[torch.dtype, torch.dtype], shared: bool,
) -> bool:  # fmt: skip
    generator = torch.Generator("cpu").manual_seed(size + rotated)

    def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        shape = shape if rank == 4 else shape[1:]
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

    def some_heads(count: int) -> torch.Tensor:
        return random(dtypes[0], *((2, count, 5, size) if heads == 1 else (2, 5, count, size)))

    width = rotated // 2 if form.tables == "pair" else rotated
    tables = 1 if shared else 2
    cos, sin = random(dtypes[1], tables, 5, width), random(dtypes[1], tables, 5, width)
    q: torch.Tensor = some_heads(3)
    k = some_heads(1) if "k" in form.roles else None
    given = {"q": q, "k": k, "cos": cos, "sin": sin}
    if "freqs" in form.roles:
        given["freqs"] = torch.complex(cos, sin)
    arguments = tuple(given[role] for role in form.roles)
    copies = [t.clone() for t in arguments if t is not None]
    try:
        with torch.no_grad():
            out = function(*copies, **named)
    except PROBE_ERRORS:
        return False
    if rank == 3:
        q, cos, sin = q.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0)
        k = None if k is None else k.unsqueeze(0)
    expected = [t for t in rope_reference(q, k, cos, sin, heads=heads, **form.options) if t is not None]
    found = list(out) if isinstance(out, tuple | list) else [out]
    if len(found) != len(expected) or not all(isinstance(t, torch.Tensor) for t in found):
        return False
    if rank == 3:
        expected = [t.squeeze(0) for t in expected]
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
