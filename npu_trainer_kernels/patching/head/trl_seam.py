"""Replaces the function by which TRL's SFT, DPO, KTO, RLOO and GRPO trainers compute log-probabilities.

TRL (1.15 and later) gives the model a fused head. At each call it looks up three module-level names:
`trl.trainer.utils._ChunkedLogProbFunction`, `_use_triton`, to learn whether to remove the rows without a label, and
`DTensor`, to learn whether to gather a weight first. Dispatchers in their place decide call by call: inside the forward
of a patched model (`patching.call`) they use this package, everywhere else TRL's original. They are installed once,
counted, and removed with the last handle.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...ops.attention import Shared, take
from ...ops.checks import FLOATS
from ...ops.head import (
    OUTPUTS,
    HeadOptions,
    LinearLogProbOutput,
    linear_logprob_reference,
    logprob_options,
    planned_linear_logprob,
    unshared,
)
from ...support.optional import INSTALL
from ...support.triton import MissingDependencyError
from ..call import Call, CallSettings, current_call, current_plan
from ..parallel import gathered_over
from ..patch import Patch, Scene, Site
from ..undo import Undo
from .head_call import labelled_rows
from .lm_head import causal_lm

__all__ = ["TrlHeadPatch", "seam"]

_MODULE, _FUNCTION, _COMPACTS = "trl.trainer.utils", "_ChunkedLogProbFunction", "_use_triton"
_SHARDED = "DTensor"
# TRL's name of an output, and this package's.
_NAMES = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
_PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
assert set(_NAMES.values()) == set(OUTPUTS)


def _apply(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = tuple(_NAMES),
    *,
    call: Call,
    site: Site,
) -> tuple[torch.Tensor | None, ...]:
    """Replaces TRL's function: same arguments, same five outputs. TRL's tile width, `chunk_size`, is ignored."""
    scored, count, places = call.scored, targets.shape[0], None
    if scored is not None and scored.left_to_us:
        scored.left_to_us = False
        # If the model's own forward has changed the labels, all rows are computed.
        if scored.shape[0] * scored.shape[1] == count and len(scored.read()) < count:
            places = Shared.make(scored.read(), count, hidden.device)
            hidden, targets = take(hidden, places), targets.index_select(0, places.gather.rows)
    wanted = tuple(_NAMES[o] for o in outputs if o in _NAMES)
    settings = call.settings
    site.ran += 1
    options = logprob_options(temperature, final_logit_softcapping, logit_scale, wanted)
    objective = chunk_rows = on_mismatch = None
    weight, bias, sharded = _unsharded(call.module, weight, bias)
    if site.look is not None and not isinstance(weight, DTensor):
        _compare(site, hidden, weight, bias, targets, options)
        if site.off is not None:
            settings.trl = None  # TRL's function serves later calls
            return _as_trls(_plain(hidden, weight, bias, targets, options, wanted), places, count)
    plan = current_plan()
    if torch.is_grad_enabled() and plan is not None:
        found = plan.for_rows(targets.shape[0], weight, hidden.element_size(), scored)
        if found is not None:
            objective, chunk_rows, on_mismatch = found.objective, found.chunk_rows, plan.mismatch
    elif torch.is_grad_enabled() and settings.learned.usable is not None:
        objective, on_mismatch = settings.learned.usable, settings.learned.mismatch
    out = planned_linear_logprob(
        hidden, weight, targets, bias, options, backend=site.backend,
        objective=objective, chunk_rows=chunk_rows, on_mismatch=on_mismatch,
    )  # fmt: skip
    if sharded is not None and not torch.is_grad_enabled():
        sharded.reshard()  # with gradients, FSDP does so after backward
    if plan is None:
        settings.learned.watch(out.log_prob)
    return _as_trls(out, places, count)


def _as_trls(out: LinearLogProbOutput, places: Shared | None, count: int) -> tuple[torch.Tensor | None, ...]:
    """Returns the outputs in TRL's order, expanded to `count` rows where only some of them were computed."""
    monitored = (None if t is None else t.detach() for t in (out.log_sum_sq_probs, out.mean_logit, out.is_top1))
    results = (out.log_prob, out.entropy, *monitored)
    if places is None:
        return results
    # The other rows are zeros, as TRL makes them.
    rows = places.gather.rows
    return tuple(None if t is None else t.new_zeros(count).index_copy(0, rows, t) for t in results)


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, options: HeadOptions,
    wanted: Sequence[str],
) -> LinearLogProbOutput:  # fmt: skip
    """Computes the outputs by their definitions, from full logits."""
    return linear_logprob_reference(
        hidden, weight, targets, bias, temperature=options.temperature, softcap=options.softcap,
        logit_scale=options.logit_scale, outputs=wanted,
    )  # fmt: skip


def _compare(
    site: Site, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
    options: HeadOptions,
) -> None:  # fmt: skip
    """Compares the log-probabilities of some rows with those of their logits."""
    x, ids = labelled_rows(hidden, targets, -100) or (hidden[:0], targets[:0])
    assert site.look is not None
    site.look(
        site,
        lambda: _plain(x, weight, bias, ids, options, ())[:1],
        lambda: planned_linear_logprob(x, weight, ids, bias, options, backend=site.backend)[:1],
    )


def _unsharded(
    module: Any, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Returns the head's parameters, and the head itself where it is an FSDP2 unit of its own.

    TRL reads such a head's parameters without calling it, and would pass a full copy. FSDP would not see the copy's
    gradient, so each rank's shard would get the gradient of that rank's tokens alone. So the unit is unsharded, and its
    own parameters are used.
    """
    head: Any = module.get_output_embeddings()
    own_unit = isinstance(head, FSDPModule)
    if not own_unit or not isinstance(head.weight, DTensor):
        return weight, bias, None
    head.unshard()
    return head.weight, head.bias, head


class TrlSeam:
    """The dispatchers in place of TRL's names; `acquire` and `release` count the handles that need them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Any] = {}

    def unsupported(self) -> str | None:
        """Returns why TRL's head cannot be served here, or None."""
        if importlib.util.find_spec("trl") is None:
            return f"TRL is not installed (pip install {INSTALL['trl']})"
        try:
            utils = importlib.import_module(_MODULE)
        except (ImportError, OSError, RuntimeError) as error:
            return f"{_MODULE} cannot be imported ({type(error).__name__}: {error})"
        if not hasattr(utils, _FUNCTION) or not hasattr(utils, "add_fused_lm_head"):
            return f"TRL {_version()} has no fused head to serve (1.15 and later have)"
        # TRL's function, even while a dispatcher replaces it.
        function = self._originals.get(_FUNCTION, getattr(utils, _FUNCTION))
        if function is not None:  # TRL 1.15 without Triton has the name, but no function
            found = tuple(inspect.signature(function.forward).parameters)[1:]
            if found != _PARAMETERS:
                return f"TRL {_version()}'s {_FUNCTION} takes {', '.join(found)}; expected {', '.join(_PARAMETERS)}"
        return None

    def acquire(self) -> None:
        """Installs the dispatchers for the first user. Raises `MissingDependencyError` where TRL cannot be served."""
        reason = self.unsupported()
        if reason is not None:
            raise MissingDependencyError(reason)
        utils = importlib.import_module(_MODULE)
        with self._lock:
            self._users += 1
            if self._users == 1:
                ours = {_FUNCTION: _dispatcher(getattr(utils, _FUNCTION))}
                if hasattr(utils, _COMPACTS):  # TRL 1.15 always leaves unlabelled rows out
                    ours[_COMPACTS] = _dispatching_use_triton(getattr(utils, _COMPACTS))
                if hasattr(utils, _SHARDED):  # TRL 1.15 gathers nothing
                    ours[_SHARDED] = _dispatching_dtensor(getattr(utils, _SHARDED))
                self._originals = {name: getattr(utils, name) for name in ours}
                for name, value in ours.items():
                    setattr(utils, name, value)

    def release(self) -> None:
        """Restores TRL's names when the last user leaves."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                utils = importlib.import_module(_MODULE)
                for name, original in self._originals.items():
                    setattr(utils, name, original)
                self._originals = {}


def _dispatcher(original: Any) -> Any:
    class Dispatcher:
        """`apply` runs this package's function inside the forward of a patched model, and TRL's elsewhere."""

        @staticmethod
        def apply(*args: Any) -> tuple[torch.Tensor | None, ...]:
            call = current_call()
            if call is None or call.settings.trl is None:
                return original.apply(*args)
            site, dtypes = call.settings.trl, {args[0].dtype, args[1].dtype}
            if original is not None and (others := dtypes.difference(FLOATS)):
                site.declined[f"{', '.join(str(d).removeprefix('torch.') for d in others)} values"] += 1
                return original.apply(*args)
            return _apply(*args, call=call, site=site)

    return Dispatcher


def _dispatching_use_triton(original: Callable[[torch.device], bool]) -> Callable[[torch.device], bool]:
    def use_triton(device: torch.device) -> bool:
        # TRL asks in order to remove the rows without a label, which would make the host wait for the device once per
        # mask and once in backward. `_apply` removes them by indices that the host knows, on every device.
        call = current_call()
        if call is None or call.settings.trl is None:
            return original(device)
        if call.settings.compacts and call.scored is not None:
            call.scored.left_to_us = True
            return False
        return call.settings.compacts

    return use_triton


def _dispatching_dtensor(original: type) -> type:
    class Gathered(type):
        """Makes `isinstance` false for the weight of a head that is served sharded, which TRL would gather."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) and not _is_served_sharded(instance)

    return Gathered(original.__name__, (), {})


def _is_served_sharded(weight: Any) -> bool:
    call = current_call()
    if call is None or call.settings.trl is None:
        return False
    model: Any = call.module
    head = model.get_output_embeddings()
    if weight is not head.weight or weight.dtype not in FLOATS:
        return False
    mesh = gathered_over(head)
    if mesh is None:
        return isinstance(head, FSDPModule)  # `_unsharded` gathers it
    return weight.device_mesh == mesh and unshared(weight, head.bias) is None


def _version() -> str:
    return importlib.metadata.version("trl")


seam = TrlSeam()


class TrlHeadPatch(Patch):
    """Replaces the head that TRL's trainers add by `ops.linear_logprob`. It changes names in TRL and no class."""

    op = "linear_logprob"
    compared_later = True

    def candidates(self, scene: Scene) -> Iterable[tuple[str, nn.Module]]:
        path, module = causal_lm(scene.model)
        return [(path, scene.model if module is None else module)]

    def recognise(self, module: nn.Module, scene: Scene) -> Any:
        if causal_lm(module)[1] is None:
            return "no causal language model found"
        return seam.unsupported() or ()

    def detail(self, site: Site) -> str:
        return ""

    def patched_class(self, site: Site) -> type[nn.Module]:
        return site.kind

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        if settings.trl is None:
            seam.acquire()
            undo.add(seam.release)
        settings.trl = site
