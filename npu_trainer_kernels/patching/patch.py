"""A patch is a value with a guard.

`recognise` finds, once, what a module computes: a *form*, a reason to leave it alone, or None where it is no candidate.
What it finds was proven on a few numbers, so it is not enough: `declines` looks at every single call (arguments,
dtypes, layout, hooks, weights, what else the module's code reads) and says why the op must not serve it, or None. `run`
serves it. What is declined is done by the class's own forward, as if nothing had been patched.

All modules of one class and one form share a *site*: their generated class, and the counts of what ran and what was
declined, from which the report is made.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from .. import backends
from ..ops.checks import FLOATS
from ..tuned import Entry
from .call import CallSettings, generates
from .classes import is_patched_class, original_class, subclass_with_forward
from .undo import Undo

__all__ = [
    "PLAIN",
    "PROBE_ERRORS",
    "QUIET",
    "Aside",
    "Late",
    "Patch",
    "Scene",
    "Site",
    "guarded",
    "is_transformed",
    "keeps_own_code",
    "no_float",
    "no_plain",
    "set_on_instance",
    "while_recognised",
]

# What foreign code may raise when it is given a probe. None of it is an error of ours: the module is left alone.
PROBE_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError,
)  # fmt: skip

# Tensors that are their own storage. A fake one stands for the parameter that it was made of.
PLAIN = frozenset((torch.Tensor, nn.Parameter, FakeTensor))
_FLOATS = frozenset(FLOATS)

QUIET = ""
"""Declined, and nothing to report: the model's own code is as good for this call (generation on a CPU, say)."""


class Aside(str):
    """A reason to leave something alone that costs the run nothing: the short report is silent about it."""


@dataclass(frozen=True)
class Late:
    """What `run` returns instead of a result where only the work itself showed that the call is not for the op."""

    reason: str


@dataclass(frozen=True)
class Scene:
    """What a patch may know of the model that a module is in.

    Attributes:
        model: that the kernels are applied to.
        ops: that are being applied.
        where: the device that the model is on, or is going to be.
        dtype: of its parameters.
        backend: the override of the choice of backends, or None.
        tiled_mlp: the most tokens that a gated MLP is to compute at once; 0: any number.
        norms: what norms were found to compute (`modules.norm_forms`).
    """

    model: nn.Module
    ops: tuple[str, ...]
    where: torch.device
    dtype: torch.dtype
    backend: str | None
    tiled_mlp: int = 0
    norms: dict[Any, Any] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def checkpoints(self) -> bool:
        """Whether memory counts for more than a matrix product: where layers are checkpointed that is said already."""
        return any(getattr(module, "gradient_checkpointing", False) is True for module in self.model.modules())


@dataclass
class Site:
    """The modules of one class that one op serves in one form, and what became of their calls.

    Attributes:
        op, kind, form: the key.
        backend: the override for the op's calls, as `apply_npu_kernels` was given it.
        measured: what `npu-kernels tune` found at the modules' sizes, each for a range of tokens.
        otherwise_own: whether the modules' own code is as good for numbers of tokens that were not measured.
        cls: the generated class.
        served: the backend that serves it, for the report.
        detail: for the report.
        paths: of the modules.
        ran: calls that the op served.
        declined: calls that it did not, by reason.
        progress: what the op has to say of the calls that it served, as a string; None: nothing.
        late: its calls are compared where their results are used (`audit`).
        look: called with the site and two functions, one for what the modules' own code makes of a call and one for
            what the op makes of it, while calls are compared; None: they are not.
        off: why the op serves none of its calls any more; `QUIET` for as long as the modules' own code is asked for.
    """

    op: str
    kind: type[nn.Module]
    form: Any
    backend: str | None
    measured: tuple[Entry, ...] = ()
    otherwise_own: bool = False
    cls: Any = None
    served: str = ""
    detail: str = ""
    paths: list[str] = field(default_factory=list)
    ran: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    progress: Any = None
    late: bool = False
    look: Callable[["Site", Callable[[], Any], Callable[[], Any]], None] | None = None
    off: str | None = None

    @functools.cached_property
    def switches(self) -> bool:
        """Whether for some numbers of tokens the modules' own code is to run."""
        return self.otherwise_own or any(entry.plain_wins for entry in self.measured)

    def prefers_own(self, tokens: int) -> bool:
        """Whether the modules' own code was measured to be faster for so many tokens."""
        for entry in self.measured:
            low, high = entry.tokens
            if low <= tokens <= high:
                return entry.plain_wins
        return self.otherwise_own

    def stands_aside(self) -> bool:
        """Whether the forward that is running generates, one token of each row: it waits for the host and not for the
        device, and beside an H200 an op with its Triton launch took longer than all that it stands for. A vendor's
        operator is launched as PyTorch's are, and stands for several of those; nothing was measured there: it stays."""
        return self.served != "vendor" and generates()


def is_transformed() -> bool:
    """Whether a call is part of a transform of torch.func, of a derivative in forward mode or of a trace: autograd's
    functions, which ops are made of, have none."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._is_tracing()


_TRANSFORM = "a transform of torch.func, a derivative in forward mode, or torch.jit.trace"
_EXCHANGED = "its class has been given another forward"


def guarded(
    site: Site,
    declines: Callable[..., str | None],
    run: Callable[..., Any],
    instead: Callable[..., Any] | None,
    tokens: Callable[..., int],
    counts: bool = True,
) -> Callable[..., Any]:
    """The one forward: `run` where the call is accepted, else `instead`, or with None the class's own; all take the
    same arguments. Without `counts` it is `run` that counts what the op serves, since that comes later."""
    recognised = site.kind.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Looked up at the call: somebody may replace the class's forward after the patch.
        own = instead or site.kind.forward
        # Kernels are no part of compiled graphs. A count that is guarded on would compile anew at every call.
        if site.stands_aside() or torch.compiler.is_compiling():
            return own(*args, **kwargs)
        if site.look is None and site.switches and site.prefers_own(tokens(*args, **kwargs)):
            return own(*args, **kwargs)
        reason = site.off
        if reason is None and is_transformed():
            reason = _TRANSFORM
        if reason is None:
            reason = declines(*args, **kwargs) if site.kind.forward is recognised else _EXCHANGED
        if reason is None and site.look is not None and not site.late:
            site.look(site, _anew(own, args, kwargs), _anew(run, args, kwargs))
            return own(*args, **kwargs)
        if reason is None:
            result = run(*args, **kwargs)
            if type(result) is not Late:
                site.ran += counts
                return result
            reason = result.reason
        if reason is not QUIET:
            site.declined[reason] += 1
        return own(*args, **kwargs)

    return forward


def _anew(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Calls a function with copies of its tensors, which it may write to."""

    def call() -> Any:
        given, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return function(*given, **named)

    return call


class Patch:
    """How one op gets into models. Subclasses say what they recognise and serve; `patches.PATCHES` is their table.

    Attributes:
        op: its name in `backends.OPS`.
        counts_later: a call that is served is counted by `run`, when the op runs.
        compared_later: whether what it serves can be compared with the modules' own code only where it is used.
    """

    op: ClassVar[str]
    counts_later: ClassVar[bool] = False
    compared_later: ClassVar[bool] = False

    def candidates(self, scene: Scene) -> Iterable[tuple[str, nn.Module]]:
        """Modules to look at, by path."""
        return scene.model.named_modules()

    def recognise(self, module: Any, scene: Scene) -> Any:
        """The form of a module (hashable), a sentence that says why it is left alone, or None: no candidate."""
        raise NotImplementedError

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        """Why a call is not for the op, or None; `QUIET` where the report need not say."""
        raise NotImplementedError

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Serves a call that was not declined, or returns `Late`."""
        raise NotImplementedError

    def asked_for(self, scene: Scene) -> bool:
        """Whether an option asks for the op wherever it can be, as if by its name."""
        return False

    def detail(self, site: Site) -> str:
        """What the report says of a site beyond its op and class."""
        return str(site.form)

    def sizes(self, module: Any, form: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """dtype and sizes of what a module computes, in the order of `workloads.Workload.model_sizes`; None where
        nothing that was measured counts."""
        return None

    def keeps_plain(self, form: Any, scene: Scene) -> str | None:
        """Why modules of a form keep their own code unless the op is asked for by name, or None."""
        return None

    def misses(self, scene: Scene) -> bool:
        """Whether the report is to say in short, too, that all modules keep their own code on a device."""
        return False

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        """How many tokens a call has (of a module: the rows of its first tensor)."""
        x = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        return x.numel() // x.shape[-1] if x is not None and x.dim() else 0

    def served_by(self, site: Site, scene: Scene) -> tuple[str, str]:
        """The backend for a site, and why if that is not the op's own reason."""
        return backends.explain(self.op, scene.where, scene.backend)

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        """Puts a module on its site, if it is not there."""
        # What is derived from the site's class stays: that is below it.
        now = type(module)
        if (now is original_class(module) or is_patched_class(now)) and not issubclass(now, site.cls):
            undo.set_class(module, site.cls)

    def own(self, site: Site) -> Callable[..., Any] | None:
        """What does the calls that the op does not; None: the class's own forward."""
        return None

    def patched_class(self, site: Site) -> type[nn.Module]:
        """The class that the modules of a site are given."""
        bind = functools.partial
        forward = guarded(
            site, bind(self.declines, site), bind(self.run, site), self.own(site), self.tokens, not self.counts_later
        )
        return subclass_with_forward(site.kind, functools.wraps(site.kind.forward)(forward))


def while_recognised(site: Site, rewritten: Callable[..., Any]) -> Callable[..., Any]:
    """A forward rewritten from that of a site's class, for as long as the class has that one, and the op is wanted."""
    kind: Any = site.kind
    recognised = kind.forward

    @functools.wraps(rewritten)
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = kind.forward is not recognised or site.stands_aside()
        return (kind.forward if own else rewritten)(*args, **kwargs)

    return forward


def set_on_instance(module: nn.Module) -> str | None:
    """Why a class's forward is not what runs when a module is called, or None."""
    if "forward" not in vars(module):
        return None
    found: Any = vars(module)["forward"]
    while isinstance(found, functools.partial):
        found = found.func
    whose = getattr(getattr(found, "__func__", found), "__module__", None) or type(found).__module__
    return f"its forward was set on the instance, by {whose}"


def no_float(x: Any) -> str | None:
    """Why a tensor's numbers are nothing for the ops, or None."""
    if type(x) not in PLAIN:
        return f"a {type(x).__name__} is no plain tensor"
    if x.dtype not in _FLOATS:
        return f"{str(x.dtype).removeprefix('torch.')} values"
    return None


def no_plain(module: nn.Module, *names: str) -> str | None:
    """Why parameters of a module cannot be read as they are (None among them is well), or None."""
    parameters = module._parameters
    for name in names:
        parameter = parameters.get(name, _MISSING)
        if parameter is not None and (type(parameter) not in PLAIN or parameter.dtype not in _FLOATS):
            if parameter is _MISSING:
                return f"it has no parameter {name} (adapters and parametrisations put theirs in the place of it)"
            return f"its {name} is no plain float32, bfloat16 or float16 parameter"
    return None


_MISSING: Any = object()


def keeps_own_code(site: Site, x: torch.Tensor) -> bool:
    """Whether a module had better run its own code for this call: without gradients the torch backend saves nothing,
    and generation calls every norm once a token. Not while the two are compared."""
    if torch.is_grad_enabled() or site.look is not None:
        return False
    return backends.choose(site.op, x.device, site.backend) == "torch"
