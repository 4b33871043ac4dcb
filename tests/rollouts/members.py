"""What users do around `generate`: for each kind of trouble its members, as scenarios that are run without and with
captured steps, and must be seen to do the same.

A scenario gets a model and returns everything that its user can see: tokens, calls, random numbers, caches.
"""

import functools
import random
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .common import greedy

SIZE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "eos_token_id": 1}


def rows(count: int = 2, columns: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (count, columns), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, seed: int = 0, tokens: int = 6, count: int = 2, **options: Any) -> Any:
    """The tokens of some rows."""
    config = greedy(tokens, **{name: options.pop(name) for name in list(options) if name not in _ARGUMENTS})
    found = model.generate(rows(count, seed=seed), generation_config=config, **options)
    return found.tolist() if isinstance(found, torch.Tensor) else found


_ARGUMENTS = ("attention_mask", "past_key_values", "logits_processor", "stopping_criteria", "input_ids", "streamer")


@dataclass(frozen=True)
class Member:
    """A scenario.

    Attributes:
        run: is given a model; returns what its user sees.
        reason: a part of the reason for which `generate` runs at least once; None: every call is a rollout.
        rollouts: the number of calls that are rollouts; None: it depends on the threads.
        family, options: of the model.
        keep: whether steps are kept.
    """

    run: Callable[[Any], Any]
    reason: str | None
    rollouts: int | None = 0
    family: str = "llama"
    options: dict[str, Any] | None = None
    keep: bool = True


# ---------------------------------------------------------------------------------------------------------------------
# Hooks and modes
# ---------------------------------------------------------------------------------------------------------------------


class Counter:
    """A hook that is an object, counts its calls, and steers from the third one on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        self.calls += 1
        out = rest[-1] if rest else None
        return out + 3.0 if isinstance(out, torch.Tensor) and self.calls > 2 else None


def _hooked(register: Callable[[Any, Any], Any], calls: int = 1) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        hook = Counter()
        handle = register(model, hook)
        try:
            return [generated(model, seed) for seed in range(calls)], hook.calls
        finally:
            handle.remove()

    return run


def _between(model: Any) -> Any:
    hook, mlp = Counter(), model.model.layers[0].mlp
    before = generated(model)
    handle = mlp.register_forward_hook(hook)
    hooked = generated(model)
    handle.remove()
    return before, hooked, hook.calls, generated(model)


def _with_a_function(model: Any) -> Any:
    seen: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    found = generated(model)
    handle.remove()
    return found, seen


def _in_mode(kind: Any) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        with kind() as mode:
            found = generated(model)
        return found, mode.linears

    return run


class Functions(TorchFunctionMode):
    linears = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linears += func is nn.functional.linear
        return func(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    linears = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linears += func is torch.ops.aten.mm.default
        return func(*args, **kwargs or {})


def _prepares_itself(model: Any) -> Any:
    calls = []
    own = model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.prepare_inputs_for_generation = prepare
    try:
        return generated(model), len(calls)
    finally:
        del model.prepare_inputs_for_generation


def _normed_by_hook(model: Any) -> Any:
    nn.utils.weight_norm(model.model.layers[0].mlp.up_proj)
    found = generated(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight_g.mul_(2)
    return found, generated(model)


HOOKS = {
    "forward": Member(_hooked(lambda m, h: m.model.layers[0].mlp.register_forward_hook(h)), "has hooked"),
    "forward, twice": Member(_hooked(lambda m, h: m.model.layers[0].register_forward_hook(h), 2), "has hooked"),
    "with kwargs": Member(
        _hooked(lambda m, h: m.model.layers[0].self_attn.register_forward_hook(
            lambda module, args, kwargs, out: h(module, args), with_kwargs=True)), "has hooked"),
    "always called": Member(_hooked(lambda m, h: m.lm_head.register_forward_hook(h, always_call=True)), "has hooked"),
    "pre": Member(_hooked(lambda m, h: m.model.norm.register_forward_pre_hook(h)), "has hooked"),
    "of the model": Member(
        _hooked(lambda m, h: m.register_forward_pre_hook(lambda module, args: h(module, args))), "hooked the model"),
    "partial": Member(
        _hooked(lambda m, h: m.model.embed_tokens.register_forward_hook(functools.partial(h))), "has hooked"),
    "every module": Member(
        _hooked(lambda m, h: nn.modules.module.register_module_forward_hook(
            lambda module, args, out: h(module, args) if module is m.lm_head else None)), "hooked every module"),
    "a function that appends": Member(_with_a_function, "has hooked lm_head"),
    "between rollouts": Member(_between, "has hooked", 2),
    "weight_norm": Member(_normed_by_hook, "WeightNorm"),
    "backward": Member(
        _hooked(lambda m, h: m.lm_head.register_full_backward_hook(lambda mod, grads, out: h(mod, grads))), None, 1),
    "a mode of functions": Member(_in_mode(Functions), "a mode of other code sees its operators (Functions)"),
    "a mode of operators": Member(_in_mode(Operators), "a mode of other code sees its operators (Operators)"),
    "prepares each token": Member(_prepares_itself, "its prepare_inputs_for_generation is its own"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Masks with gaps
# ---------------------------------------------------------------------------------------------------------------------


def _with_gaps(model: Any) -> Any:
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 1:3] = 0
    return generated(model, tokens=12, attention_mask=mask), generated(model, attention_mask=mask.float() * 0.5)


GAPS = {
    "no window": Member(_with_gaps, "has gaps"),
    "a window": Member(_with_gaps, "has gaps", family="mistral", options={"sliding_window": 4}),
    "biases by position": Member(_with_gaps, "has gaps", family="bloom"),
    "chunks": Member(_with_gaps, "has gaps", family="llama4_text"),
}


# ---------------------------------------------------------------------------------------------------------------------
# More than tokens
# ---------------------------------------------------------------------------------------------------------------------


_ENDS = {"do_sample": True, "top_k": 0, "eos_token_id": 1, "sequence_bias": {(1,): 6.0}}


def _draws(model: Any) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    made = [generated(model, seed, 20, count, **_ENDS) for seed, count in enumerate((3, 1, 2))]
    return made, torch.rand(3).tolist(), random.random(), np.random.rand()


def _draws_and_declines(model: Any) -> Any:
    torch.manual_seed(0)
    made = [generated(model, 1, 20, 2, **_ENDS), generated(model, 2, 8, 2, **{**_ENDS, "no_repeat_ngram_size": 3})]
    return made, torch.rand(3).tolist()


def _greedy_between(model: Any) -> Any:
    torch.manual_seed(0)
    return (
        generated(model),
        torch.rand(1).item(),
        generated(model, 3, 9, eos_token_id=list(range(3, 30))),
        torch.rand(1),
    )


def _keys(cache: Any) -> list[torch.Tensor]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


def _cache_that_is_handed_in(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    found = generated(model, past_key_values=cache)
    return found, cache.get_seq_length(), _keys(cache)


def _cache_that_is_returned(model: Any) -> Any:
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, :2] = 0
    found = generated(model, 0, 9, attention_mask=mask, return_dict_in_generate=True, **{**_ENDS, "do_sample": False})
    cache = getattr(found, "cache", None) or found.past_key_values
    return found.sequences.tolist(), cache.get_seq_length(), _keys(cache)


def _cache_that_has_tokens(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    first = model.generate(rows(), past_key_values=cache, generation_config=greedy(3))
    return first.tolist(), model.generate(first, past_key_values=cache, generation_config=greedy(4)).tolist()


OUTPUTS = {
    "random state, three rollouts": Member(_draws, None, 3),
    "random state, not kept": Member(_draws, None, 3, keep=False),
    "random state, one is declined": Member(_draws_and_declines, "NoRepeatNGram", 1),
    "random state of greedy rollouts": Member(_greedy_between, None, 2),
    "a cache that is handed in": Member(_cache_that_is_handed_in, None, 1),
    "a cache with a window": Member(_cache_that_is_handed_in, None, 1, family="mistral", options={"sliding_window": 4}),
    "a cache that is returned": Member(_cache_that_is_returned, None, 1),
    "a cache that has tokens": Member(_cache_that_has_tokens, "it is given a cache (DynamicCache)", 1),
}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that Python reads, draws or counts
# ---------------------------------------------------------------------------------------------------------------------

FACTOR = 1.0
FACTORS = {"mlp": 1.0}


def _scale() -> float:
    return FACTOR


class Holder:
    def __init__(self) -> None:
        self.factor = 1.0


class Scaled(nn.Module):
    """An MLP whose result has a factor that a function gives at each call."""

    shared = 1.0

    def __init__(self, inner: nn.Module, factor: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.factor, self.holder, self.calls, self.seen = inner, factor, Holder(), 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor(self)


def _scaled(factor: Callable[[Any], Any], change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        global FACTOR
        FACTOR, Scaled.shared, FACTORS["mlp"] = 1.0, 1.0, 1.0
        random.seed(0)
        np.random.seed(0)
        layer = model.model.layers[0]
        layer.mlp = Scaled(layer.mlp, factor)
        made = []
        for seed in (0, 0, 1):
            made.append(generated(model, seed))
            change(layer.mlp)
        mlp = layer.mlp
        return made, mlp.calls, len(mlp.seen), random.random(), np.random.rand()

    return run


def _compiled(make: Callable[[nn.Module], nn.Module]) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        layer = model.model.layers[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit
            layer.mlp = make(layer.mlp)
        try:
            return [generated(model, seed) for seed in (0, 1)]
        finally:
            torch.compiler.reset()

    return run


def _compiles_itself(mlp: nn.Module) -> nn.Module:
    mlp.compile(backend="eager")
    return mlp


def _traced(mlp: nn.Module) -> nn.Module:
    traced: nn.Module = torch.jit.trace(nn.Linear(32, 32), torch.ones(1, 1, 32))
    return traced


def _set_global(mlp: Any) -> None:
    global FACTOR
    FACTOR *= -3.0


def _set_class(mlp: Any) -> None:
    Scaled.shared *= -3.0


def _set_entry(mlp: Any) -> None:
    FACTORS["mlp"] *= -3.0


def _set_held(mlp: Any) -> None:
    mlp.holder.factor *= -3.0


def _set_attribute(mlp: Any) -> None:
    mlp.calls += 2


def _nothing(mlp: Any) -> None:
    pass


def _closure() -> Member:
    inside = [1.0]

    def factor(module: Any) -> float:
        return inside[0]

    def change(mlp: Any) -> None:
        inside[0] *= -3.0

    def run(model: Any) -> Any:
        inside[0] = 1.0
        return _scaled(factor, change)(model)

    return Member(run, None, 3)


def _cell() -> Member:
    inside = 1.0

    def change(mlp: Any) -> None:
        nonlocal inside
        inside *= -3.0

    def run(model: Any) -> Any:
        nonlocal inside
        inside = 1.0
        return _scaled(lambda module: inside, change)(model)

    return Member(run, None, 3)


def _counted(module: Any) -> float:
    module.calls += 1
    return 1.0 + module.calls % 3


def _collected(module: Any) -> float:
    module.seen.append(1)
    return float(len(module.seen) % 4)


PYTHON = {
    "a global": Member(_scaled(lambda module: FACTOR, _set_global), None, 3),
    "a global that a function reads": Member(_scaled(lambda module: _scale(), _set_global), None, 3),
    "a global, not kept": Member(_scaled(lambda module: FACTOR, _set_global), None, 3, keep=False),
    "a class": Member(_scaled(lambda module: type(module).shared, _set_class), None, 3),
    "an attribute": Member(_scaled(lambda module: 1.0 + module.calls, _set_attribute), None, 3),
    "an entry of a dictionary": Member(_scaled(lambda module: FACTORS["mlp"], _set_entry), None, 3),
    "a held object": Member(_scaled(lambda module: module.holder.factor, _set_held), None, 3),
    "a closure": _closure(),
    "a variable of a closure": _cell(),
    "drawn by random": Member(_scaled(lambda module: 1 + random.random(), _nothing), "draws"),
    "drawn by NumPy": Member(_scaled(lambda module: 1 + float(np.random.rand()), _nothing), "draws"),
    "compiled": Member(_compiled(lambda mlp: torch.compile(mlp, backend="eager")), "mlp is compiled"),
    "compiled by itself": Member(_compiled(_compiles_itself), "compiled"),
    "compiled by torch.jit": Member(_compiled(_traced), "mlp is compiled"),
    "counted": Member(_scaled(_counted, _nothing), "_counted"),
    "collected": Member(_scaled(_collected, _nothing), "seen"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Refusals that hold for a state
# ---------------------------------------------------------------------------------------------------------------------


def _checkpointed_at_first(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable()
    first = generated(model)
    model.gradient_checkpointing_disable()
    model.eval()
    return first, generated(model), generated(model, 1)


def _drops_out_at_first(model: Any) -> Any:
    torch.manual_seed(0)
    model.train()
    first = generated(model), torch.rand(1).item()
    model.eval()
    return first, generated(model), generated(model, 1)


def _under_inference_at_first(model: Any) -> Any:
    with torch.inference_mode():
        first = generated(model)
    return first, generated(model), generated(model, 1)


def _profiled_at_first(model: Any) -> Any:
    sys.setprofile(lambda *_: None)
    try:
        first = [generated(model) for _ in range(4)]
    finally:
        sys.setprofile(None)
    return first, generated(model), generated(model, 1)


def _processes_at_first(model: Any) -> Any:
    first = generated(model, no_repeat_ngram_size=2)
    return first, generated(model), generated(model, 1)


def _draws_inside_at_first(model: Any) -> Any:
    layer = model.model.layers[0]
    own, layer.mlp = layer.mlp, nn.Sequential(layer.mlp, nn.Dropout(0.5))
    model.train()
    torch.manual_seed(0)
    first = generated(model), torch.rand(1).item()
    layer.mlp = own
    return first, generated(model), generated(model, 1)


def _fails_once(error: type[BaseException]) -> Callable[[Any], Any]:
    def factor(module: Any) -> float:
        if FACTOR < 0:
            raise error("once")
        return FACTOR

    def run(model: Any) -> Any:
        global FACTOR
        FACTOR = 1.0
        layer = model.model.layers[0]
        layer.mlp = Scaled(layer.mlp, factor)
        first = generated(model)
        FACTOR = -1.0
        try:
            failed: Any = generated(model, 1)
        except error as found:
            failed = str(found)
        FACTOR = 2.0
        return first, failed, generated(model), generated(model, 1)

    return run


def _without_room_at_first(model: Any) -> Any:
    own = torch.Tensor.new_zeros

    def new_zeros(self: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("once")

    torch.Tensor.new_zeros = new_zeros  # type: ignore[method-assign]
    try:
        first = generated(model)
    finally:
        torch.Tensor.new_zeros = own  # type: ignore[method-assign]
    return first, generated(model)


def _in_another_dtype_at_first(model: Any) -> Any:
    first = generated(model.double())
    model.float()
    return first, generated(model), generated(model, 1)


def _replaced(model: Any) -> Any:
    first, layer = generated(model), model.model.layers[0]
    own, layer.mlp = layer.mlp, nn.Identity()
    second = generated(model)
    layer.mlp, model.lm_head = own, nn.Linear(32, 61, bias=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.arange(32 * 61).view(61, 32).sin())
    return first, second, generated(model)


def _parametrized(model: Any) -> Any:
    first, linear = generated(model), model.model.layers[0].mlp.up_proj
    nn.utils.parametrizations.weight_norm(linear)
    second = generated(model)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(-2)
    third = generated(model)
    nn.utils.parametrize.remove_parametrizations(linear, "weight")
    return first, second, third, generated(model)


STATES = {
    "an error": Member(_fails_once(ValueError), "raises ValueError", 3),
    "an interruption": Member(_fails_once(KeyboardInterrupt), None, 3),
    "no memory": Member(_without_room_at_first, "do not fit into the device's memory", 1),
    "another dtype": Member(_in_another_dtype_at_first, "float64", 2),
    "other modules": Member(_replaced, None, 3),
    "parametrizations": Member(_parametrized, None, 4),
    "gradient checkpointing": Member(_checkpointed_at_first, "gradient checkpointing is on", 2),
    "dropout of attention": Member(
        _drops_out_at_first, "its attention drops out", 2, options={"attention_dropout": 0.1}
    ),
    "a module with dropout": Member(_draws_inside_at_first, "it draws random numbers", 2),
    "inference mode": Member(_under_inference_at_first, "inference mode is on", 2),
    "a profiler": Member(_profiled_at_first, "a profiler watches this thread", 2),
    "a processor": Member(_processes_at_first, "NoRepeatNGram", 2),
}


# ---------------------------------------------------------------------------------------------------------------------
# Threads, and `generate` inside of `generate`
# ---------------------------------------------------------------------------------------------------------------------


def _in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(jobs)

    def go(at: int) -> None:
        found[at] = jobs[at]()

    threads = [threading.Thread(target=go, args=(at,)) for at in range(len(jobs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def _two_generate(model: Any) -> Any:
    def job(first: int) -> Callable[[], Any]:
        return lambda: [generated(model, seed, 8) for seed in range(first, first + 4)]

    return _in_threads(job(0), job(4))


def _one_trains(model: Any) -> Any:
    ids = rows(seed=9)

    def trains() -> Any:
        norms = []
        for _ in range(8):
            model(input_ids=ids, labels=ids).loss.backward()
            norms.append(sorted(name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()))
            model.zero_grad()
        return norms

    return _in_threads(lambda: [generated(model, seed, 4) for seed in range(4)], trains)


def _one_is_declined(model: Any) -> Any:
    return _in_threads(
        lambda: [generated(model, seed, 6) for seed in range(4)],
        lambda: [generated(model, seed, 6, no_repeat_ngram_size=2) for seed in range(4)],
    )


def _two_ask_for_outputs(model: Any) -> Any:
    def job(named: bool) -> Callable[[], Any]:
        def run() -> Any:
            made = [generated(model, seed, 4, return_dict_in_generate=named) for seed in range(4)]
            return [each.sequences.tolist() if named else each for each in made]

        return run

    return _in_threads(job(False), job(True))


THREADS = {
    "one is declined": Member(_one_is_declined, "", None),
    "two ask for other outputs": Member(_two_ask_for_outputs, None, 8),
    "two generate": Member(_two_generate, None, 8),
    "two generate, nothing is kept": Member(_two_generate, None, 8, keep=False),
    "one trains": Member(_one_trains, None, 4, keep=False),
}

KINDS = {
    "hooks": HOOKS, "gaps": GAPS, "outputs": OUTPUTS, "python": PYTHON, "states": STATES, "threads": THREADS,
}  # fmt: skip
