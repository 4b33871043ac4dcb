"""One family, plain and patched: the same numbers, the same modules afterwards, and a report that tells what ran.

The plain model runs once, in fp32 and in fp64; each set of ops is compared with that by the accuracy rule of
`tests/closeness.py`. What ran is counted from outside of the package, by Python's profiler: which module's `forward`
was entered and which op file's functions were called inside it.
"""

import contextlib
import copy
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import nn

import npu_trainer_kernels
from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES, Report
from tests.closeness import FACTOR, assert_as_close, rounded
from tests.models import in_double

from .tiny import batch, padded, tiny_model

__all__ = ["OP_SETS", "Finding", "Result", "compare"]

# By name -> the `ops` argument.
OP_SETS: dict[str, tuple[str, ...] | None] = {"default": None, "all": PATCHES}
_OPS = Path(npu_trainer_kernels.__file__).parent / "ops"
_ENTERED = nn.Module._call_impl.__code__
_NEW_TOKENS = 4

Values = dict[str, torch.Tensor | None]
# In fp32, in fp64, and in fp32 under each rounding, which is computed where something has to be held to it.
Expected = tuple[Values, Values, Callable[[], Sequence[Values]]]


@dataclass(frozen=True)
class Finding:
    """What is wrong in one stage of a comparison."""

    stage: str
    symptom: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.symptom}"


@dataclass
class Result:
    """A family's comparison with one set of ops."""

    task: str
    kind: str
    op_set: str
    findings: list[Finding] = field(default_factory=list)
    report: Report | None = None
    # Stage -> why the plain model itself does not get through it.
    left_out: dict[str, str] = field(default_factory=dict)
    # (op, module's path) of every module that a report calls replaced and that the input reached.
    ran: set[tuple[str, str]] = field(default_factory=set)


def _is_call(name: str) -> bool:
    """Whether a function of an op's file computes: not what it is compared with, nor the question whether it serves."""
    return "reference" not in name and name != "unserved"


class Watch:
    """Which modules were entered, and which op's functions were called inside which of them, while it is on."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, list[str]] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                self._owners.setdefault(id(parameter), []).append(path)
        self._bare = {
            path: [
                f"{path}.{name}" for name, child in module.named_children() if not any(True for _ in child.parameters())
            ]
            for path, module in model.named_modules()
        }
        self._open: list[str] = []
        self.entered: set[str] = set()
        self.ran: set[tuple[str, str]] = set()

    def _event(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code is _ENTERED:
            path = self._paths.get(id(frame.f_locals["self"]))
            if path is None:
                return
            if event == "call":
                self._open.append(path)
                self.entered.add(path)
            elif event == "return":
                self._open.pop()
        elif event == "call" and code.co_filename.startswith(str(_OPS)) and _is_call(code.co_name):
            op = Path(code.co_filename).stem
            self.ran.update((op, path) for path in self._open)
            given = [id(value) for value in frame.f_locals.values() if isinstance(value, nn.Parameter)]
            # What has no parameter can be told apart by its place alone.
            bare = self._bare.get(self._open[-1] if self._open else "", ()) if not given else ()
            self.ran.update((op, path) for path in (*bare, *(p for i in given for p in self._owners.get(i, ()))))

    def __enter__(self) -> "Watch":
        self._open.clear()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: Any) -> None:
        sys.setprofile(None)


def _train(model: Any, inputs: dict[str, Any], watch: Watch | None = None) -> Values:
    """Loss and gradients."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with watch or contextlib.nullcontext():
        out = model(**inputs)
    # A few families have no loss of their own.
    loss = out.logits.square().mean() if out.loss is None else out.loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **grads}


def _checkpointed(model: Any, inputs: dict[str, Any], refresh: Callable[[], None] = lambda: None) -> Values:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    refresh()
    try:
        return _train(model, inputs)
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()  # transformers leaves its hooks otherwise
        refresh()


def _logits(model: Any, inputs: dict[str, Any]) -> Values:
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        return {"logits": model(**inputs).logits}


def _generated(model: Any, inputs: dict[str, Any]) -> Values:
    model.eval()
    torch.manual_seed(0)
    # Copies: some families write into what they are given.
    given = {name: value.clone() for name, value in inputs.items() if name != "labels"}
    tokens = model.generate(**given, max_new_tokens=_NEW_TOKENS, do_sample=False)
    return {"tokens": tokens if isinstance(tokens, torch.Tensor) else tokens.sequences}


def _trl(
    model: Any, inputs: dict[str, Any], refresh: Callable[[], None] = lambda: None, watch: Watch | None = None
) -> Values:
    """Loss and gradients through the head that TRL's trainers add."""
    trl_utils.add_fused_lm_head(model)
    refresh()
    try:
        return _train(model, {**inputs, "fused_lm_head": True}, watch)
    finally:
        del model.forward


def _padded(model: Any, inputs: dict[str, Any], watch: Watch | None = None) -> Values:
    """Loss and gradients of a batch with padding, some of whose rows begin alike."""
    return _train(model, {**padded(inputs), "use_cache": False}, watch)


_STAGES: dict[str, Callable[..., Values]] = {
    "training": _train,
    "checkpointing": _checkpointed,
    "evaluation": _logits,
    "generation": _generated,
    "TRL's head": _trl,
    "padding": _padded,
}


def _different(actual: Values, reference: Values, truth: Values, moved: Callable[[], Sequence[Values]]) -> str | None:
    """The first difference that the accuracy rule does not allow, and how many there are."""
    found = []
    for name, value in actual.items():
        if (value is None) != (reference[name] is None):
            found.append(f"{name}: {'no ' if value is None else 'a '}gradient, unlike the plain model")
        elif value is not None:
            try:
                if _is_noise(name, truth):
                    # The bias of keys moves all scores of a query alike: its gradient is zero, and its values are draws
                    # of rounding, of which only the size can be compared. The terms that cancel in it are as large as
                    # those of the gradient of the same module's weight.
                    size = value.norm().item()
                    usual = max(reference[name].norm().item(), torch.finfo(value.dtype).eps * _beside(name, truth))
                    if size > FACTOR * usual:
                        usual = max(usual, *(m[name].norm().item() for m in moved()))
                    assert size <= FACTOR * usual, f"{name}: noise of {size:.3e}, where plain PyTorch has {usual:.3e}"
                else:
                    others = functools.partial(_of_each, moved, name)
                    assert_as_close(value, reference[name], truth[name], name, others)
            except AssertionError as error:
                found.append(str(error))
    return f"{found[0]} ({len(found)} of {len(actual)} differ)" if found else None


def _of_each(moved: Callable[[], Sequence[Values]], name: str) -> list[Any]:
    return [values[name] for values in moved()]


def _beside(name: str, truth: Values) -> float:
    """The largest norm among the gradients of the module that a parameter belongs to."""
    module = name.rpartition(".")[0]
    return max(v.norm().item() for n, v in truth.items() if v is not None and n.rpartition(".")[0] == module)


def _is_noise(name: str, truth: Values) -> bool:
    """Whether a value is zero but for the rounding of fp64."""
    largest = max(v.abs().max().item() for v in truth.values() if v is not None and v.numel())
    exact = truth[name]
    return exact is not None and exact.numel() > 1 and 0.0 < exact.abs().max().item() < 1e-12 * largest


def raised(error: Exception) -> str:
    """An exception with the places that it came through: the last of ours, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/npu_trainer_kernels/" in f.filename.replace("tests/", "")]
    places = [f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno}" for f in (*ours[-1:], frames[-1])]
    message = str(error).strip().split("\n")
    return f"{type(error).__name__}: {message[-1][:200]} [{', '.join(dict.fromkeys(places))}]"


_HOOKS = {name for name in vars(nn.Module()) if name.endswith("_hooks")}


def _state(model: nn.Module) -> dict[str, Any]:
    """What `restore` must bring back: of every module its class, its attributes, its hooks; the values."""
    modules = {
        path: (
            type(m),
            {name: id(value) for name, value in vars(m).items() if callable(value)},
            {name: list(value) for name, value in vars(m).items() if name in _HOOKS},
            sorted(vars(m)),
        )
        for path, m in model.named_modules()
    }
    seam = {name: id(value) for name, value in vars(trl_utils).items()}
    return {"modules": modules, "seam": seam, "values": {n: v.clone() for n, v in model.state_dict().items()}}


def _not_restored(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for path, state in before["modules"].items():
        now = after["modules"].get(path, ("gone", {}, {}, []))
        for kind, a, b in zip(("class", "attributes", "hooks", "names"), state, now, strict=True):
            if a != b:
                what = sorted({k for k in {*a, *b} if a.get(k) != b.get(k)}) if isinstance(a, dict) else f"{a} -> {b}"
                return f"{path or 'the model'}: its {kind} are not as they were: {what}"
    if before["seam"] != after["seam"]:
        return "TRL's names are not as they were"
    if list(before["values"]) != list(after["values"]):
        return "the keys of state_dict differ"
    same = all(torch.equal(v, after["values"][n]) for n, v in before["values"].items())
    return None if same else "values of state_dict differ"


# A norm's work may be done by the op of the layer or attention around it.
_SERVES = {"rms_norm": ("rms_norm", "add_rms_norm", "linear_rms_norm")}


# The head's op runs where the loss is formed, outside of the head.
_ANYWHERE = ("linear_cross_entropy", "linear_logprob")


def _misreported(stage: str, report: Report, watch: Watch, result: Result) -> str | None:
    """What the report counts, beside what was seen: an op that is said to have run where none did, or the other way."""
    wrong = []
    seen_ops = {op for op, _ in watch.ran}
    for site in report.sites:
        if (site.op == "linear_logprob") != (stage == "TRL's head"):
            continue
        if site.op == "varlen_attention" and site.form.proof.mixes:
            continue  # its attention is its own; what is left out is counted by its own test (test_mixers.py)
        if site.op == "varlen_attention" and not site.form.proof.attention:
            # Where states alone go by segments, no attention is seen: `test_states.py` counts what is left out.
            result.ran.update((site.op, path) for path in site.paths if site.ran)
            continue
        served = _SERVES.get(site.op, (site.op,))
        paths = [path for path in site.paths if any((op, path) in watch.ran for op in served)]
        seen = site.op in seen_ops if site.op in _ANYWHERE else bool(paths)
        result.ran.update((site.op, path) for path in (site.paths if seen and site.op in _ANYWHERE else paths))
        # A norm whose work its layer's op does is not called itself.
        alone = any((site.op, path) in watch.ran for path in paths) if site.op == "rms_norm" else seen
        # A body inside of one that is served has no padding left.
        outer = any(other.op == site.op == "varlen_attention" and other.ran for other in report.sites)
        if (site.ran > 0) != alone and not (seen and (site.op == "rms_norm" or outer)):
            wrong.append(f"{site.op} {site.kind.__name__} {site.paths[0] or 'the model'}: {site.ran} calls counted")
    return f"not as counted: {wrong[0]} ({len(wrong)} in all)" if wrong else None


class Plain:
    """The plain model's results in every stage: in fp32, and in fp64 from a copy."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self._model, self._inputs = model, inputs
        # The model itself is patched by the time that somebody asks what rounding does to it.
        self._plain = copy.deepcopy(model)
        self._exact = copy.deepcopy(model).double()
        # Grouped products have no fp64.
        self._exact.config._experts_implementation = "eager"
        self._double = {name: v.double() if v.is_floating_point() else v for name, v in inputs.items()}
        self.watch = Watch(model)
        self.training = _train(model, inputs, self.watch)
        # What the family's own code raises there is a string.
        self.stages: dict[str, Expected | str] = {"training": self._held_to("training", self.training)}
        for stage, function in _STAGES.items():
            if stage == "training":
                continue
            try:
                reference = function(model, inputs)
            except Exception as error:  # noqa: BLE001 - what a family cannot do without us is no finding of ours
                self.stages[stage] = raised(error)
                continue
            self.stages[stage] = self._held_to(stage, reference)

    def _held_to(self, stage: str, reference: Values) -> Expected:
        if stage == "generation":
            return reference, reference, lambda: []
        if stage == "checkpointing":  # the same function
            known = self.stages["training"]
            assert not isinstance(known, str)
            return known
        with in_double():
            truth = _STAGES[stage](self._exact, self._double)
        return reference, truth, functools.cache(lambda: rounded(lambda: _STAGES[stage](self._plain, self._inputs)))


def compare(task: str, kind: str, op_sets: dict[str, tuple[str, ...] | None] = OP_SETS) -> list[Result]:
    """Compares the family's tiny model with itself under each set of ops."""
    model = tiny_model(task, kind)
    inputs = batch(model)
    plain = Plain(model, inputs)
    before = _state(model)
    results = []
    for name, ops in op_sets.items():
        result = Result(task, kind, name)
        results.append(result)
        _compare_one(model, inputs, plain, before, ops, result)
    gc.collect()
    return results


def _compare_one(model: Any, inputs: dict[str, Any], plain: Plain, before: dict[str, Any],
                 ops: tuple[str, ...] | None, result: Result) -> None:  # fmt: skip
    def note(stage: str, symptom: str | None) -> None:
        if symptom is not None:
            result.findings.append(Finding(stage, symptom))

    try:
        kernels = apply_npu_kernels(model, ops=ops)
    except Exception as error:  # noqa: BLE001 - the sweep lists every failure
        note("apply", raised(error))
        note("restore", _not_restored(before, _state(model)))
        return
    with kernels:
        result.report = kernels.report()
        for stage, function in _STAGES.items():
            expected = plain.stages[stage]
            if isinstance(expected, str):
                result.left_out[stage] = expected
                continue
            watch = Watch(model)
            options = {
                "training": (watch,),
                "checkpointing": (kernels.refresh,),
                "TRL's head": (kernels.refresh, watch),
                "padding": (watch,),
            }
            try:
                actual = function(model, inputs, *options.get(stage, ()))
            except Exception as error:  # noqa: BLE001 - the sweep lists every failure
                note(stage, raised(error))
                continue
            note(stage, _different(actual, *expected))
            if watch in options.get(stage, ()):
                note("report", _misreported(stage, result.report, watch, result))
    kernels.restore()
    note("restore", _not_restored(before, _state(model)))
    again = _train(model, inputs)
    same = all(v is None or torch.equal(v, again[n]) for n, v in plain.training.items())
    note("restore", None if same else "loss and gradients are not the bits of before")
