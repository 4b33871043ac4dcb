"""A patch lets an op compute in place of recognised modules, and checks every call first.

`recognise` runs once for a module. It returns a *form* (a hashable description of what the module computes), why the
module is left alone, or None: no candidate. A form was verified on a few numbers only, so `declines` checks every call
(arguments, dtypes, layout, hooks, weights, other values that the module's code reads), and returns why the op must not
serve it, or None. `run` serves the call: it computes the result with the op. A declined call runs the class's own
forward, as if nothing had been patched.

All modules of one class and one form share a *site*: the generated class, and the counts of served and declined calls
from which the report is made.
"""

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from .. import backends
from ..evidence.tuned import Entry
from ..ops.checks import FLOATS
from .bound_forwards import has_other_forward, kernel_of_package
from .call import CallSettings, generates
from .classes import is_patched_class, original_class, subclass_with_forward
from .undo import Undo

__all__ = [
    "PLAIN",
    "PROBE_ERRORS",
    "UNREPORTED",
    "Attempts",
    "HarmlessReason",
    "LateRefusal",
    "Patch",
    "Reason",
    "Scene",
    "Site",
    "guarded",
    "is_transformed",
    "keeps_own_code",
    "no_float",
    "no_plain",
    "others_forward",
    "others_kernel",
    "serves_tokens",
    "set_on_instance",
    "while_recognised",
]

# Other libraries' code may raise these on a probe's inputs: the module is left alone.
PROBE_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError,
)  # fmt: skip

# Types of tensors that wrap no other tensor. A FakeTensor stands for the parameter that it was made from.
PLAIN = frozenset((torch.Tensor, nn.Parameter, FakeTensor))
_FLOATS = frozenset(FLOATS)

# The backend whose ops serve a forward of one token of each row; all others stand aside. The host is the bottleneck
# there, and next to an H200 an op with its Triton launch took longer than all that it replaces. A vendor's operator is
# launched as PyTorch's are, and replaces several of those; it keeps serving, unmeasured.
_SERVES_TOKENS = "vendor"

UNREPORTED = ""
"""The reason of a declined call that the report omits: the original code is as good (generation on a CPU, say)."""


Attempts = tuple[tuple[str, str], ...]
"""Ways to serve a module that have failed, each with its reason."""


class Reason(str):
    """A reason to leave a module alone, with all `attempts` to serve it where there were several."""

    attempts: Attempts

    def __new__(cls, text: str, attempts: Attempts = ()) -> "Reason":
        made = super().__new__(cls, text)
        made.attempts = attempts
        return made


class HarmlessReason(Reason):
    """A reason to leave a module alone that costs the run nothing, so the short report omits it."""


@dataclass(frozen=True)
class LateRefusal:
    """Returned by `run` instead of a result when only the work itself showed that the op cannot serve the call."""

    reason: str


@dataclass(frozen=True)
class Scene:
    """The properties of a model that patches may read.

    Attributes:
        model: the model that the kernels are applied to.
        ops: the ops that are being applied.
        where: the device that the model is on, or will be on.
        dtype: the dtype of its parameters.
        backend: the override of the choice of backend, or None.
        tiled_mlp: the maximum number of tokens that a gated MLP computes at once; 0: any number.
        norms: a cache of the forms of norms (`modules.norm_forms`).
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
        """Whether layers are checkpointed, which shows that memory matters more than the time of a matrix product."""
        return any(getattr(module, "gradient_checkpointing", False) is True for module in self.model.modules())


@dataclass
class Site:
    """The modules of one class that one op serves in one form, with counts of their calls.

    Attributes:
        op, kind, form: the op's name, the modules' original class and their form.
        backend: the override that `apply_npu_kernels` was called with.
        measured: the measurements of `npu-kernels tune` at the modules' sizes, each for a range of tokens.
        otherwise_own: whether calls with an unmeasured number of tokens run the original code.
        cls: the generated class.
        served: the name of the backend, for the report.
        detail: a description, for the report.
        paths: the paths of the modules in the model.
        ran: the number of calls that the op served.
        declined: the numbers of calls that it did not serve, by reason.
        progress: an object whose string describes the served calls in the report, or None.
        late: whether its calls are compared where their results are used (`audit`).
        look: while calls are compared, a function of the site, of two functions, which compute a call by the original
            code and by the op, and of the module or function; otherwise None. It returns whether the call is to run the
            original code (in a look), or the code that training runs.
        off: why the op no longer serves any call; `UNREPORTED` while the original code is requested.
        attempts: the ways to serve the modules that have failed before the form was found.
        beside: what the op leaves to some of the modules' code, for the report.
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
    look: Callable[..., bool] | None = None
    off: str | None = None
    attempts: Attempts = ()
    beside: str = ""

    @functools.cached_property
    def switches(self) -> bool:
        """Whether calls with some numbers of tokens run the modules' original code."""
        return self.otherwise_own or any(entry.plain_wins for entry in self.measured)

    def prefers_own(self, tokens: int) -> bool:
        """Whether the modules' original code is faster for so many tokens, by measurement where there is one."""
        for entry in self.measured:
            low, high = entry.tokens
            if low <= tokens <= high:
                return entry.plain_wins
        return self.otherwise_own


def is_transformed() -> bool:
    """Whether a call is part of a torch.func transform, a forward-mode derivative or a torch.jit trace, which the ops'
    autograd functions do not support."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._is_tracing()


_TRANSFORM = "a transform of torch.func, a derivative in forward mode, or torch.jit.trace"
_EXCHANGED = "its class has been given another forward"


def serves_tokens(site: Site) -> bool:
    """Whether a site's op serves single tokens of generation, too."""
    return site.served == _SERVES_TOKENS


def guarded(
    site: Site,
    declines: Callable[..., str | None],
    run: Callable[..., Any],
    instead: Callable[..., Any] | None,
    tokens: Callable[..., int],
    counts: bool = True,
) -> Callable[..., Any]:
    """Returns the forward of a patched class: it calls `run` for accepted calls, else `instead` (None: the class's
    own), with the same arguments. Without `counts`, `run` counts the served calls, since it serves them later."""
    recognised = site.kind.forward
    first = next(iter(tuple(inspect.signature(recognised).parameters)[1:]), "")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == len(kwargs) == 1 and first in kwargs:  # a module that is given its one tensor by name
            args, kwargs = (*args, kwargs[first]), {}
        # Looked up at the call, since other code may replace the class's forward after the patch.
        own = instead or site.kind.forward
        # Every module asks this for every token, so here is no call that could be left out. Kernels are no part of
        # compiled graphs: a guard on a count would cause a recompilation at every call.
        if (generates() and site.served != _SERVES_TOKENS) or torch.compiler.is_compiling():
            return own(*args, **kwargs)
        if site.look is None and site.switches and site.prefers_own(tokens(*args, **kwargs)):
            return own(*args, **kwargs)
        reason = site.off
        if reason is None and is_transformed():
            reason = _TRANSFORM
        if reason is None:
            reason = declines(*args, **kwargs) if site.kind.forward is recognised else _EXCHANGED
        if reason is None and site.look is not None and not site.late:
            of = args[0] if isinstance(args[0], nn.Module) else own
            looks = site.look(site, _anew(own, args, kwargs), _anew(run, args, kwargs), of)
            if looks or (site.switches and site.prefers_own(tokens(*args, **kwargs))):
                return own(*args, **kwargs)
            reason = site.off
        if reason is None:
            result = run(*args, **kwargs)
            if type(result) is not LateRefusal:
                site.ran += counts
                return result
            reason = result.reason
        if reason is not UNREPORTED:
            site.declined[reason] += 1
        return own(*args, **kwargs)

    return forward


def _anew(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that calls `function` with copies of its tensors, since it may write to them."""

    def call() -> Any:
        given, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return function(*given, **named)

    return call


class Patch:
    """Applies one op to models. Subclasses define what they recognise and serve; `patches.PATCHES` lists them.

    Attributes:
        op: the op's name in `backends.OPS`.
        counts_later: whether `run` counts a served call, when the op runs.
        compared_later: whether served calls can be compared with the original code only where their results are used.
    """

    op: ClassVar[str]
    counts_later: ClassVar[bool] = False
    compared_later: ClassVar[bool] = False

    def candidates(self, scene: Scene) -> Iterable[tuple[str, nn.Module]]:
        """Returns the modules to look at, with their paths."""
        return scene.model.named_modules()

    def recognise(self, module: Any, scene: Scene) -> Any:
        """Returns a module's form (hashable), a sentence that says why it is left alone, or None: no candidate."""
        raise NotImplementedError

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        """Returns why the op does not serve a call, or None; `UNREPORTED` where the report omits the reason."""
        raise NotImplementedError

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Serves a call that was not declined, or returns `LateRefusal`."""
        raise NotImplementedError

    def asked_for(self, scene: Scene) -> bool:
        """Whether an option requests the op, as if `ops` had named it."""
        return False

    def detail(self, site: Site) -> str:
        """Returns the report's description of a site beyond its op and class."""
        return str(site.form)

    def attempts(self, form: Any) -> Attempts:
        """Returns the ways to serve modules of a form that have failed before this one was found."""
        return ()

    def sizes(self, module: Any, form: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Returns the dtype and sizes of a module's computation, in the order of `Workload.model_sizes` of
        `descriptions`; None where no measurement applies."""
        return None

    def keeps_plain(self, form: Any, scene: Scene) -> str | None:
        """Returns why modules of a form keep their original code unless the op is requested by name, or None."""
        return None

    def misses(self, scene: Scene) -> bool:
        """Whether the short report, too, says that all modules keep their original code on a device."""
        return False

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        """Returns the number of tokens of a call (of a module: the rows of its first tensor)."""
        x = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        return x.numel() // x.shape[-1] if x is not None and x.dim() else 0

    def served_by(self, site: Site, scene: Scene) -> tuple[str, str]:
        """Returns the backend for a site, and the reason if it is not the op's own reason."""
        return backends.explain(self.op, scene.where, scene.backend)

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        """Gives a module the class of its site, unless it has it."""
        # A class that other code derived from the site's class stays, since the site's class is below it.
        now = type(module)
        if (now is original_class(module) or is_patched_class(now)) and not issubclass(now, site.cls):
            undo.set_class(module, site.cls)

    def own(self, site: Site) -> Callable[..., Any] | None:
        """Returns the function that runs the calls that the op does not serve; None: the class's own forward."""
        return None

    def patched_class(self, site: Site) -> type[nn.Module]:
        """Creates the class of a site's modules."""
        bind = functools.partial
        forward = guarded(
            site, bind(self.declines, site), bind(self.run, site), self.own(site), self.tokens, not self.counts_later
        )
        return subclass_with_forward(site.kind, functools.wraps(site.kind.forward)(forward))


def while_recognised(site: Site, rewritten: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that calls `rewritten` while the class has the forward that this was made from, unless the op
    stands aside."""
    kind: Any = site.kind
    recognised = kind.forward

    @functools.wraps(rewritten)
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = kind.forward is not recognised or (generates() and site.served != _SERVES_TOKENS)
        return (kind.forward if own else rewritten)(*args, **kwargs)

    return forward


# Other packages of kernels, by the beginning of their modules' names: whose they are, and how to do without them.
_OTHERS = {
    "liger_kernel": ("Liger-Kernel's", "use_liger_kernel=False switches it off"),
    "unsloth": ("Unsloth's", "load the model by transformers to do without it"),
}


def _with_inner(function: Any) -> Iterator[Any]:
    """Yields a function, and what it binds or wraps."""
    yield function
    if isinstance(function, functools.partial):
        yield from _with_inner(function.func)
    elif isinstance(function, types.MethodType):
        yield from _with_inner(function.__func__)
    if (wrapped := getattr(function, "__dict__", {}).get("__wrapped__")) is not None:
        yield from _with_inner(wrapped)


def others_kernel(function: Any) -> str | None:
    """Returns whose kernel a function or a class is, and how to do without it, if it is of another package of kernels,
    else None. Such packages replace forwards on instances, in classes, and whole classes."""
    for each in _with_inner(function):
        name = str(getattr(each, "__module__", None))
        for beginning, (whose, do) in _OTHERS.items():
            if name.startswith(beginning):
                return f"{whose}: {do}"
    return None


def others_forward(module: nn.Module) -> str | None:
    """Returns that a module runs another package's kernel, as a reason, or None."""
    cls = original_class(module)
    whose = others_kernel(vars(module).get("forward")) or others_kernel(cls.forward) or others_kernel(cls)
    return None if whose is None else f"its forward is {whose}"


def set_on_instance(module: nn.Module) -> str | None:
    """Returns why calling a module does not run the model's own forward of its class, or None."""
    if (reason := others_forward(module)) is not None:
        return reason
    if not has_other_forward(module):
        return None
    if (whose := kernel_of_package(module)) is not None:
        return f"its forward is {whose}"
    found: Any = vars(module)["forward"]
    while isinstance(found, functools.partial):
        found = found.func
    whose = getattr(getattr(found, "__func__", found), "__module__", None) or type(found).__module__
    return f"its forward was set on the instance, by {whose}"


def no_float(x: Any) -> str | None:
    """Returns why the ops do not take a tensor of this type or dtype, or None."""
    if type(x) not in PLAIN:
        return f"a {type(x).__name__} is no plain tensor"
    if x.dtype not in _FLOATS:
        return f"{str(x.dtype).removeprefix('torch.')} values"
    return None


def no_plain(module: nn.Module, *names: str) -> str | None:
    """Returns why the ops cannot read parameters of a module directly, or None. A parameter may be None."""
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
    """Whether a module should run its original code for this call: without gradients the torch backend saves nothing,
    and generation calls every norm once per token. False while the two are compared."""
    if torch.is_grad_enabled() or site.look is not None:
        return False
    return backends.choose(site.op, x.device, site.backend) == "torch"
