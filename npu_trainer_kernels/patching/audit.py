"""Compares the ops with the model's original code, once, on a batch of the run itself.

A probe is small, and some rules begin beyond it: a slice of 32 columns, a clamp, an expert that the probe never chose.
So before the first forward of a training run some rows of its batch go three times through the body, without gradients:

    own       the original code, padding included; every op that would have served a call is compared with the
              modules' original code on the same inputs
    rounded   the original code again, while every operator's result moves by a random part of its last unit
    served    the code that training will run: without padding, with ops in place of modules

Two correct implementations differ by rounding, so the distance between `own` and `rounded` is the measure, in the dtype
and at the depth of this very model. The error of a row (the values of a token) is

    rms(served - own) / rms(own)

and the median and the 99th percentile of all rows' errors may be `FACTOR` times those of `rounded`. An op with larger
errors is disabled, with a warning that names it, before the optimizer's first step. A head is compared where its loss
is computed, on some of its rows.

Nobody sees these forwards: attributes, buffers and random states are put back (`kept_state`), and a model with code
that may leave another trace (`probe.traces`: a counter, a list, a hook that collects) is not run. Then each op whose
module leaves no trace is compared in the run's own first forward, on its inputs there, and the report says what was not
compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from ..support.errors import one_line
from ..support.rounding import Rounded
from .body import draws_for_tokens, first_rows, under_way
from .call import generates
from .classes import is_patched_class, leaves_out_hooks
from .head import is_partitioned
from .patch import PROBE_ERRORS, UNREPORTED, LateRefusal, Site
from .probe import kept_state, repeatable, trace_of_function, trace_of_operators, traces_within
from .undo import Undo

__all__ = ["FACTOR", "Audit", "Audited", "distance", "some_rows"]

FACTOR = 8.0
"""The allowed multiple of the errors that rounding makes."""

_QUANTILES = (0.5, 0.99)
_ROWS = 3
_BY_ROW = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels")


@dataclass
class Audited:
    """The result of one comparison.

    Attributes:
        rows, longest: the number of compared rows, and the number of positions in each.
        calls: the number of compared calls of modules.
        farthest: the largest distance of the ops that stay enabled, as a fraction of the limit.
        seconds: the time that the comparison took.
        differing: the ops that were disabled, each with its distance.
        aside: why something was not compared, or empty.
    """

    rows: int = 0
    longest: int = 0
    calls: int = 0
    farthest: float = 0.0
    seconds: float = 0.0
    differing: list[str] = field(default_factory=list)
    aside: str = ""

    def __str__(self) -> str:
        outcome = "; ".join(self.differing) or f"at most {self.farthest:.0%} of what rounding explains"
        outcome = "; ".join(filter(None, (outcome, self.aside)))
        return f"{self.rows} rows of {self.longest} places, {self.calls} calls, {self.seconds:.2f} s: {outcome}"


# ---------------------------------------------------------------------------------------------------------------------
# Distances between results
# ---------------------------------------------------------------------------------------------------------------------


def distance(found: Any, own: Any, rounded: Any) -> float:
    """Returns how far `found` is from `own` by the rule in the module's docstring; 1 is the limit."""
    tensors = [[t for t in tree_leaves(each) if isinstance(t, torch.Tensor)] for each in (found, own, rounded)]
    if len(tensors[0]) != len(tensors[1]):
        return float("inf")
    return max((_apart(*each) for each in zip(*tensors, strict=True)), default=0.0)


def _apart(found: torch.Tensor, own: torch.Tensor, rounded: torch.Tensor) -> float:
    if found.shape != own.shape or found.dtype != own.dtype:
        return float("inf")
    if not own.is_floating_point() or not own.numel():
        return 0.0
    width = own.shape[-1] if own.dim() else 1
    rows = [t.reshape(-1, width).float() for t in (found, own, rounded)]
    finite = rows[1].isfinite().all(1) & rows[2].isfinite().all(1)  # a row that attends to nothing may be NaN
    if not finite.any():
        return 0.0
    a, b, c = (t[finite] for t in rows)
    size = b.square().mean(1).sqrt()
    # The error of a row close to zero is relative to a fraction of the largest row.
    size = size.clamp(min=max(1e-3 * float(size.max()), torch.finfo(torch.float32).tiny))
    errors = torch.stack([(t - b).square().mean(1).sqrt() / size for t in (a, c)]).nan_to_num(nan=torch.inf)
    at = [round(q * (len(size) - 1)) for q in _QUANTILES]
    off, noise = errors.sort().values[:, at].tolist()
    least = torch.finfo(own.dtype).eps / 4
    return max(f / (FACTOR * max(n, least)) for f, n in zip(off, noise, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# The rows that are compared
# ---------------------------------------------------------------------------------------------------------------------


def some_rows(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a third of a batch's rows, at least three: the longest, the shortest, the neighbours of the longest,
    which may share its prefix, then the first. Returns all rows if some argument cannot be split by rows."""
    rows, mask = _rows(given), given.get("attention_mask")
    assert rows is not None
    batch = rows.shape[0]
    count = max(3, batch // 3)
    if count >= batch or not isinstance(mask, torch.Tensor) or mask.shape != rows.shape[:2]:
        return given
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            known = value.dim() == 0 or (name in _BY_ROW and value.shape[:2] in (rows.shape[:2], (1, rows.shape[1])))
        else:
            known = not isinstance(value, dict | list | tuple)
        if not known:
            return given
    lengths = mask.ne(0).sum(1).tolist()
    longest = lengths.index(max(lengths))
    order = (longest, lengths.index(min(lengths)), (longest + 1) % batch, (longest - 1) % batch, *range(batch))
    index = torch.tensor(sorted(list(dict.fromkeys(order))[:count]))
    return {
        name: v[index.to(v.device)] if isinstance(v, torch.Tensor) and v.dim() and len(v) == batch else v
        for name, v in given.items()
    }


def _rows(given: dict[str, Any]) -> torch.Tensor | None:
    """Returns ids or embedded tokens, [B, L] or [B, L, H]; None where there are none with values."""
    rows = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    return rows if type(rows) is torch.Tensor and rows.dim() > 1 and not rows.is_meta and rows.numel() else None


def _live(out: Any, mask: Any) -> torch.Tensor:
    """Returns the hidden states (for a model without a known body, the logits) of live tokens."""
    values: Any = next(t for t in tree_leaves(tuple(out.values()) if isinstance(out, dict) else out) if _is_float(t))
    if isinstance(mask, torch.Tensor) and mask.shape == values.shape[:2]:
        return values[mask.bool()]
    return values


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


# ---------------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------------


class Audit:
    """Compares the ops with the model's original code, before forwards of a new kind.

    Args:
        sites: returns the current sites.
        leaves_out: the name of the op that skips padding.
        seen: the list that results are appended to.
        tell: called with a sentence for each thing that is disabled.
        training: True compares only forwards with gradients in training mode, False all but those of generation.
    """

    def __init__(
        self, sites: Callable[[], list[Site]], leaves_out: str, seen: list[Audited], tell: Callable[[str], None],
        training: bool,
    ) -> None:  # fmt: skip
        self._sites, self._leaves_out, self._seen, self._tell = sites, leaves_out, seen, tell
        self._training = training
        self._known: set[Any] = set()
        self._widest = 0
        self._busy = self._looking = False
        self._within: list[Site] = []  # the sites that are compared in the run's own forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Audit:
        # A copy of a patched model has the modules' classes, and with them the same sites.
        return self

    def again(self) -> None:
        """Makes the next forward be compared, whatever was compared before."""
        self._known.clear()
        self._widest = 0

    def watch(self, module: Any, undo: Undo) -> None:
        """Compares before forwards of `module`: a model's body, or the model itself if it has none."""
        names = tuple(inspect.signature(module.forward).parameters)
        undo.add(module.register_forward_pre_hook(functools.partial(_before, self, names), with_kwargs=True).remove)
        undo.add(module.register_forward_hook(functools.partial(_after, self), always_call=True).remove)
        if not is_patched_class(type(module)):
            leaves_out_hooks(module, undo)

    @property
    def busy(self) -> bool:
        """Whether a comparison is running."""
        return self._busy or bool(self._within)

    def before(self, module: Any, given: dict[str, Any]) -> None:
        """Compares a forward of a new kind: other arguments, another dtype, other sites, or rows over twice as long."""
        if self.busy or under_way() or generates() or (self._training and not _trains(module)):
            return
        rows = _rows(given)
        if rows is None:
            return
        where = rows.device.type
        cast = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else None
        sites = self._sites()
        served = tuple((id(site), len(site.paths)) for site in sites)
        kind = (frozenset(n for n, v in given.items() if v is not None), rows.dtype, cast, module.training, served)
        if kind in self._known and rows.shape[1] <= self._widest:
            return
        # Ranks that share weights compare together, at their first forward; later, some would wait for the others.
        shared = any(isinstance(part, FSDPModule) for part in module.modules())
        if (shared and self._known) or _incomparable(module, given):
            return
        self._known.add(kind)
        self._widest = max(self._widest, 2 * rows.shape[1])
        trace = traces_within(module)
        if (reason := trace(module)) is not None:
            self._compare_within(rows, sites, trace, reason)
            return
        self._busy = True
        try:
            self._compare(module, tree_map_only(torch.Tensor, torch.clone, some_rows(given)), sites)
        finally:
            self._busy = False

    def _compare_within(
        self, rows: torch.Tensor, sites: list[Site], trace: Callable[[nn.Module], str | None], reason: str
    ) -> None:
        """Compares ops in the forward that begins now, each with the code of its module if that leaves no trace."""
        found = Audited(rows.shape[0], rows.shape[1])
        found.aside = f"the model as a whole, and padding left out, are not compared, since {reason}"
        self._seen.append(found)
        self._within = [site for site in sites if site.off is None and site.op != self._leaves_out]
        for site in self._within:
            late = functools.partial(self.look_once, found)
            site.look = late if site.late else functools.partial(self._look_within, found, trace)

    def _look_within(
        self, found: Audited, trace: Callable[[nn.Module], str | None], site: Site, own: Callable[[], Any],
        served: Callable[[], Any], of: Any,
    ) -> bool:  # fmt: skip
        """Compares a call of a module or function in the run's own forward, if that leaves no trace."""
        if self._looking:
            return True
        begun = time.perf_counter()
        module = of if isinstance(of, nn.Module) else nn.Identity()
        if (trace(module) if module is of else trace_of_function(of)) is None:
            ran = [(each, each.ran, each.declined.copy()) for each in self._within]
            with kept_state(module), torch.no_grad(), _without_cast_cache():
                self.look(found, site, own, served)
            for each, count, declined in ran:
                each.ran, each.declined = count, declined
        found.seconds += time.perf_counter() - begun
        return False

    def after(self) -> None:
        """Ends the comparisons within a forward; heads are compared where their losses are computed, later."""
        for site in self._within:
            if not site.late:
                site.look = None
        self._within = []

    def _compare(self, module: Any, given: dict[str, Any], sites: list[Site]) -> None:
        begun = time.perf_counter()
        # Some modules do not keep apart the rows that a collator has packed: the original code gets them padded.
        given, apart = first_rows(given, _ROWS) or (given, given)
        rows = _rows(apart)
        assert rows is not None
        found = Audited(rows.shape[0], rows.shape[1])
        self._seen.append(found)
        bodies = [site for site in sites if site.op == self._leaves_out]
        if "use_cache" in inspect.signature(module.forward).parameters:
            given, apart = {**given, "use_cache": False}, {**apart, "use_cache": False}

        def forward(given: dict[str, Any] = apart) -> torch.Tensor:
            with repeatable(rows.device):
                return _live(module.forward(**given), given.get("attention_mask"))

        with _undisturbed(module, sites):
            with _set(bodies, "off", UNREPORTED), _set(sites, "look", functools.partial(self.look, found)):
                own = forward()
            with _set(sites, "off", UNREPORTED):
                rounded = _moved(found, forward)
            before = sum(site.ran for site in bodies)
            served = forward(given).view(own.shape)
            packed = sum(site.ran for site in bodies) > before
        if packed and rounded is not None:
            far = distance(served, own, rounded)
            for site in bodies if far > 1 else ():
                self._take_out(site, far, found)
            found.farthest = max(found.farthest, far if far <= 1 else 0.0)
        for site in sites:
            if site.late and site.off is None:
                site.look = functools.partial(self.look_once, found)
        found.seconds += time.perf_counter() - begun

    def look(
        self, found: Audited, site: Site, own: Callable[[], Any], served: Callable[[], Any], module: Any = None
    ) -> bool:
        """Compares the op's and the original code's results of a call. Calls nested in the two are not compared. Both
        draw the same numbers."""
        if not self._looking:
            self._looking = True
            try:
                given = served()
                rounded = None if type(given) is LateRefusal else _moved(found, own)
                if rounded is not None:
                    far = distance(given, own(), rounded)
                    found.calls += 1
                    if far > 1:
                        self._take_out(site, far, found)
                    else:
                        found.farthest = max(found.farthest, far)
            finally:
                self._looking = False
        return True

    def look_once(self, found: Audited, site: Site, own: Callable[[], Any], served: Callable[[], Any]) -> bool:
        """Compares a head's op with the original code on some rows, where the loss is computed."""
        begun, ran = time.perf_counter(), site.ran
        site.look = None
        if (reason := trace_of_operators()) is not None:
            found.aside = "; ".join(filter(None, (found.aside, f"{site.op} is not compared, since {reason}")))
            return False
        with torch.no_grad(), _without_cast_cache(), repeatable():
            self.look(found, site, own, served)
        site.ran = ran
        found.seconds += time.perf_counter() - begun
        return False

    def _take_out(self, site: Site, far: float, found: Audited) -> None:
        what = "padding left out" if site.op == self._leaves_out else f"{site.op} in {site.kind.__name__}"
        by = f"{far:.3g} times what rounding explains"
        site.off = f"it differed from the model's own code on the first batch, by {by}"
        found.differing.append(f"{what} ({by}): taken out")
        self._tell(
            f"NPU kernels: {what} differs from the model's own code on this batch, by {by}; it is taken out, and the "
            "model's own code runs in its place"
        )


def _moved(found: Audited, run: Callable[[], Any]) -> Any:
    """Returns the result of code under perturbed rounding; None if it fails then, as code that counts with floats
    does."""
    try:
        with Rounded(0, in_place=False):
            return run()
    except PROBE_ERRORS as error:
        found.aside = f"some code does not bear moved numbers and was not compared ({one_line(error, 80)})"
        return None


def _before(
    audit: Audit, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if not torch.compiler.is_compiling():
        audit.before(module, dict(zip(names, args, strict=False), **kwargs))


def _after(audit: Audit, module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        audit.after()


def _incomparable(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether a forward cannot be run several times: it writes to an argument (a cache), its parameters are gathered in
    a recorded order, or other threads run copies of it."""
    plain = (torch.Tensor, bool, int, float, str, type(None), torch.dtype)
    leaves = tree_leaves(dict(given))
    partitioned = any(is_partitioned(p) for p in module.parameters())
    return partitioned or getattr(module, "_is_replica", False) or not all(isinstance(v, plain) for v in leaves)


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


@contextlib.contextmanager
def _set(sites: list[Site], name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of the enabled sites that are compared here, and resets it to None. A site that is disabled in
    the meantime keeps the reason."""
    chosen = [site for site in sites if site.off is None and not site.late]
    for site in chosen:
        setattr(site, name, value)
    try:
        yield
    finally:
        for site in chosen:
            if name != "off" or site.off == UNREPORTED:
                setattr(site, name, None)


@contextlib.contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Disables autocast's cache, which would keep casts made without gradients for the forward that needs gradients."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


@contextlib.contextmanager
def _undisturbed(module: nn.Module, sites: list[Site]) -> Iterator[None]:
    """Restores counts and what modules hold after forwards without gradients. Where random numbers are drawn for each
    token, the forwards run in evaluation mode, since a packed row draws others."""
    counts = [
        (site, site.ran, site.declined.copy(), copy.deepcopy(getattr(site.progress, "__dict__", {}))) for site in sites
    ]
    config: Any = getattr(module, "config", None)
    draws = config is not None and draws_for_tokens(config.get_text_config(), module.modules())
    # On a CPU a 4-bit layer of bitsandbytes changes its weight for good in evaluation mode, and draws nothing.
    modes = [part for part in module.modules() if part.training and not _of_bitsandbytes(part)] if draws else []
    try:
        with kept_state(module), torch.no_grad(), _without_cast_cache():
            for part in modes:
                part.training = False
            yield
    finally:
        for site, ran, declined, progress in counts:
            site.ran, site.declined = ran, declined
            if progress:
                vars(site.progress).update(progress)
