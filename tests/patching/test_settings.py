"""What a form was proven with may be set otherwise after the patch: then it counts, as it does in the model."""

import copy
import functools
import itertools
import math
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama import modeling_llama
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.probe import unseen
from tests.closeness import assert_as_close, rounded
from tests.models import small_model
from tests.patching.padded import loss_of, padded, values

SIZES = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "hidden_size": 16, "intermediate_size": 24,
         "moe_intermediate_size": 24, "moe_latent_size": None, "_experts_implementation": "eager"}  # fmt: skip


class Around(nn.Module):
    """A model of one module, for rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given):
        return self.inner(*given)


class Mlp(nn.Module):
    """With a function for its activation, a limit and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.limit, self.alpha = F.silu, 0.5, 1.0

    def product(self, gate, up):
        return self.act(gate.clamp(max=self.limit) * self.alpha) * up.clamp(-self.limit, self.limit)

    def forward(self, x):
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))


class Maybe(Mlp):
    """Which has a limit only where it is told one."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = None

    def product(self, gate, up):
        return self.act(gate if self.limit is None else gate.clamp(max=self.limit)) * up


class Configured(Mlp):
    """Which has a configuration, two bounds and a name for each, that say nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.bounds = SimpleNamespace(limit=None, dtype="bfloat16"), (-math.inf, math.inf)

    def product(self, gate, up):
        gate = gate if self.config.limit is None else gate.clamp(max=self.config.limit)
        return (self.act(gate) * up.clamp(*self.bounds)).to(gate.dtype)


class Multiplied(Mlp):
    """By something that can be written to in place."""

    def __init__(self, factor: Any, name: str = "factor") -> None:
        super().__init__()
        setattr(self, name, factor)

    def product(self, gate, up):
        return self.act(gate) * up * (self.factor[0] if isinstance(self.factor, list) else self.factor)


class Buffered(Multiplied):
    """In a buffer."""

    def __init__(self) -> None:
        super().__init__(None, "unused")
        self.register_buffer("factor", torch.tensor(1.0))


class WithFactor(Multiplied):
    """In an object that it holds."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(factor=torch.tensor(1.0)), "config")

    def product(self, gate, up):
        return self.act(gate) * up * self.config.factor


FACTOR = 1.0
OUTSIDE = SimpleNamespace(inner=SimpleNamespace(factor=1.0))
FACTORS = [1.0]
TABLE = {"one": 1.0, "other": 1.0}


def multiplied(gate):
    return gate * FACTOR


class OfItsClass(Mlp):
    """With a factor that all of its class have."""

    shared = 1.0

    def product(self, gate, up):
        return F.silu(gate * self.shared) * up


class OfItsFile(Mlp):
    """With a factor that stands in its file."""

    def product(self, gate, up):
        return F.silu(gate * FACTOR) * up


class OfAFunction(Mlp):
    """With a factor in a function that it calls."""

    def product(self, gate, up):
        return F.silu(multiplied(gate)) * up


class OfAnObject(Mlp):
    """With a factor in what stands in its file."""

    def product(self, gate, up):
        return F.silu(gate * OUTSIDE.inner.factor) * up


class ByDefault(Mlp):
    """With a factor where it or its configuration is told one."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(text=SimpleNamespace(depth=1))

    def product(self, gate, up):
        factor = getattr(self, "factor", 1.0) * getattr(self.config, "factor", 1.0)
        return F.silu(gate * factor) * up / self.config.text.depth


class ByAList(Mlp):
    """With a factor in a list of its file."""

    def product(self, gate, up):
        return F.silu(gate * FACTORS[0]) * up


class OfATable(Mlp):
    """With a factor in a table of its file, as activations are."""

    def __init__(self) -> None:
        super().__init__()
        self.word = "one"

    def product(self, gate, up):
        return F.silu(gate * TABLE[self.word]) * up


class Louder(nn.RMSNorm):
    """Whose factor is a plain tensor."""

    def __init__(self) -> None:
        super().__init__(16, eps=1e-6)
        self.factor = torch.tensor(1.0)

    def forward(self, x):
        return super().forward(x) * self.factor


class Plain(nn.Module):
    """With modules for its activation and for a dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)

    def forward(self, x):
        return self.down_proj(self.drop(self.act(self.gate_proj(x))) * self.up_proj(x))


class Scaled(nn.Embedding):
    """By a number of its own."""

    scale = 3.0

    def __init__(self) -> None:
        super().__init__(7, 16)
        self.scale = 4.0

    def forward(self, ids):
        return super().forward(ids) * self.scale


def experts(cls: Any, **options: Any) -> nn.Module:
    module = cls(SimpleNamespace(**SIZES, **options))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


rows = functools.partial(torch.randn, 5, 16)


def gated() -> tuple[torch.Tensor, ...]:
    return rows(), rows()


def routed() -> tuple[torch.Tensor, ...]:
    return rows(), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]), torch.rand(5, 2)


def ids() -> torch.Tensor:
    return torch.tensor([[3, 0, 6, 3]])


def set_to(name: str, value: Any) -> Callable[[nn.Module], None]:
    """Sets an attribute by its path."""

    def change(module: nn.Module) -> None:
        *path, last = name.split(".")
        setattr(module.get_submodule(".".join(path)), last, value)

    return change


class Holds(Mlp):
    """With a factor that a function gives, which the module holds."""

    def __init__(self, make: Callable[[SimpleNamespace], Callable[[], float]]) -> None:
        super().__init__()
        self.numbers = SimpleNamespace(value=1.0)
        self.factor = make(self.numbers)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.factor() * self.up_proj(x))


class Called:
    def __init__(self, numbers: SimpleNamespace) -> None:
        self.held = numbers

    def __call__(self) -> float:
        return self.held.value

    def method(self) -> float:
        return self.held.value


def of_a_function(numbers: SimpleNamespace) -> Callable[[], float]:
    def factor() -> float:
        return getattr(numbers.function, "value", 1.0)

    numbers.function = factor
    return factor


def set_number(module: Any) -> None:
    module.numbers.value = 3.0


gpt_oss = functools.partial(experts, GptOssExperts, swiglu_limit=1.0, swiglu_alpha=1.702)
relu2 = functools.partial(experts, NemotronHExperts, mlp_hidden_act="gelu")
CASES: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Any], Callable[[Any], Any]]] = {
    "eps": ("rms_norm", lambda: nn.RMSNorm(16, eps=1e-6), rows, set_to("eps", 0.3)),
    "eps of a layer norm": ("layer_norm", lambda: nn.LayerNorm(16), rows, set_to("eps", 0.3)),
    "groups": ("gated_rms_norm", lambda: Zamba2RMSNormGated(16, 8), gated, set_to("group_size", 4)),
    "limit": ("swiglu", Mlp, rows, set_to("limit", 0.1)),
    "factor": ("swiglu", Mlp, rows, set_to("alpha", 3.0)),
    "function": ("swiglu", Mlp, rows, set_to("act", F.relu)),
    "method": ("swiglu", Mlp, rows, set_to("product", torch.add)),
    "a closure that is held": ("swiglu", lambda: Holds(lambda numbers: lambda: numbers.value), rows, set_number),
    "an object that is called": ("swiglu", lambda: Holds(Called), rows, set_number),
    "an attribute of a function": (
        "swiglu",
        lambda: Holds(of_a_function),
        rows,
        lambda module: setattr(module.factor, "value", 3.0),
    ),
    "limit that was None": ("swiglu", Maybe, rows, set_to("limit", 0.1)),
    "number of a configuration": ("swiglu", Configured, rows, lambda module: setattr(module.config, "limit", 0.1)),
    "configuration": ("swiglu", Configured, rows, set_to("config", SimpleNamespace(limit=0.1))),
    "bounds in a tuple": ("swiglu", Configured, rows, set_to("bounds", (-0.1, 0.1))),
    "what getattr has a default for": ("swiglu", ByDefault, rows, set_to("factor", 3.0)),
    "likewise of a configuration": ("swiglu", ByDefault, rows, lambda module: setattr(module.config, "factor", 3.0)),
    "two levels down": ("swiglu", ByDefault, rows, lambda module: setattr(module.config.text, "depth", 2)),
    "activation's number": ("swiglu", Plain, rows, set_to("act.approximate", "tanh")),
    "activation": ("swiglu", Plain, rows, set_to("act", nn.ReLU())),
    "dropout": ("swiglu", Plain, rows, set_to("drop.p", 1.0)),
    "experts' limit": ("moe_experts", gpt_oss, routed, set_to("limit", 0.1)),
    "experts' factor": ("moe_experts", gpt_oss, routed, set_to("alpha", 3.0)),
    "experts' activation": ("moe_experts", relu2, routed, set_to("act_fn", nn.Tanh())),
    "scale": ("embedding", Scaled, ids, set_to("scale", 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_set_later_counts(name):
    op, make, inputs, change = CASES[name]

    def made() -> Around:
        torch.manual_seed(0)
        return Around(make())

    def outcome(model: Around) -> torch.Tensor:
        torch.manual_seed(1)
        given = inputs()
        return model(*given) if isinstance(given, tuple) else model(given)

    model, plain = made(), made()
    with apply_npu_kernels(model, ops=[op]) as kernels:
        before = outcome(model)
        assert kernels.report().ran == {op: 1}
        for each in (model, plain):
            change(each.inner)
        after = outcome(model)
        assert not torch.allclose(before, after)
        assert torch.equal(after, outcome(plain))
        assert [each.op for each in kernels.report().declined] == [op]
        kernels.refresh()
        torch.testing.assert_close(outcome(model), after)


HERE = sys.modules[__name__]
# Of these there is one for all modules.
SHARED: dict[str, tuple[Callable[[], nn.Module], Any, str, Any]] = {
    "of a class": (OfItsClass, OfItsClass, "shared", 3.0),
    "of a class derived from": (type("Derived", (OfItsClass,), {}), OfItsClass, "shared", 3.0),
    "a class's method": (OfItsClass, Mlp, "forward", lambda self, x: self.down_proj(x.repeat(1, 2)[:, :24])),
    "a method that forward calls": (OfItsClass, OfItsClass, "product", lambda self, gate, up: gate),
    "of a file": (OfItsFile, HERE, "FACTOR", 3.0),
    "of a function's file": (OfAFunction, HERE, "FACTOR", 3.0),
    "a function": (OfAFunction, HERE, "multiplied", torch.tanh),
    "of an object of a file": (OfAnObject, OUTSIDE.inner, "factor", 3.0),
    "an object of a file": (OfAnObject, HERE, "OUTSIDE", SimpleNamespace(inner=SimpleNamespace(factor=3.0))),
    "a class's default": (ByDefault, ByDefault, "factor", 3.0),
}


def test_an_entry_of_a_table_counts_and_others_do_not(monkeypatch):
    torch.manual_seed(0)
    model, x = Around(OfATable()), rows()
    with apply_npu_kernels(model, ops=["swiglu"]) as kernels:
        monkeypatch.setitem(TABLE, "other", 3.0)
        before = model(x)
        assert kernels.report().ran == {"swiglu": 1}
        monkeypatch.setitem(TABLE, "one", 3.0)
        found = model(x)
        assert kernels.report().ran == {"swiglu": 1}
    assert torch.equal(found, model(x))
    assert not torch.allclose(found, before)


@pytest.mark.parametrize("name", SHARED)
def test_what_is_set_later_outside_of_a_module_counts(monkeypatch, name):
    make, holder, attribute, value = SHARED[name]
    torch.manual_seed(0)
    model = Around(make())
    x = rows()
    with apply_npu_kernels(model, ops=["swiglu"]) as kernels:
        before = model(x)
        assert kernels.report().ran == {"swiglu": 1}
        monkeypatch.setattr(holder, attribute, value, raising=False)
        found = model(x)
        assert kernels.report().ran == {"swiglu": 1}
    assert torch.equal(found, model(x))
    assert not torch.allclose(found, before)


IN_PLACE: dict[str, tuple[str, Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "tensor": ("swiglu", lambda: Multiplied(torch.tensor(1.0)), lambda module: module.factor.fill_(3.0)),
    "list": ("swiglu", lambda: Multiplied([1.0]), lambda module: module.factor.__setitem__(0, 3.0)),
    "list of a file": ("swiglu", ByAList, lambda module: FACTORS.__setitem__(0, 3.0)),
    "buffer": ("swiglu", Buffered, lambda module: module.factor.fill_(3.0)),
    "of a configuration": ("swiglu", WithFactor, lambda module: module.config.factor.fill_(3.0)),
    "of a norm": ("rms_norm", Louder, lambda module: module.factor.fill_(3.0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_may_be_written_to_in_place_counts(name):
    op, make, change = IN_PLACE[name]
    torch.manual_seed(0)
    FACTORS[0] = 1.0
    model, x = Around(make()), rows()
    with apply_npu_kernels(model, ops=[op]) as kernels:
        before = model(x)
        change(model.inner)
        after = model(x)
        assert any("written to in place" in left.reason for left in kernels.report().left_alone)
    assert not torch.allclose(before, after)
    assert torch.equal(after, model(x))


class ByLength(Mlp):
    """With another formula for many rows."""

    def forward(self, x):
        gate = self.gate_proj(x)
        if x.shape[0] > 6:
            gate = gate * 2
        return self.down_proj(F.silu(gate) * self.up_proj(x))


class ByNamedLength(Mlp):
    """Likewise, with names for sizes."""

    def forward(self, x):
        count, _ = x.shape
        gate = self.gate_proj(x) * (2 if count > 6 else 1)
        return self.down_proj(F.silu(gate) * self.up_proj(x))


class ByGradients(Mlp):
    """Whose gate is not trained."""

    def forward(self, x):
        with torch.no_grad():
            gate = self.gate_proj(x)
        return self.down_proj(F.silu(gate) * self.up_proj(x))


CUT = 6


class ByPlace(Mlp):
    """With another formula from a row on."""

    def product(self, gate, up):
        return F.silu(torch.cat((gate[:6], 2 * gate[6:]))) * up


class ByNamedPlace(Mlp):
    """Likewise, with a name for it in its file."""

    def product(self, gate, up):
        return F.silu(torch.cat((gate[:CUT], 2 * gate[CUT:]))) * up


class ByItsPlace(Mlp):
    """Likewise, with a name of its own."""

    cut = 6

    def product(self, gate, up):
        return F.silu(torch.cat((gate[: self.cut], 2 * gate[self.cut :]))) * up


class ByCount(Mlp):
    """Which keeps the sixteen largest of a row."""

    def product(self, gate, up):
        least = gate.topk(min(16, gate.shape[-1])).values[..., -1:]
        return F.silu(gate.masked_fill(gate < least, 0.0)) * up


class Penalized(Mlp):
    """Which keeps something for a term of the loss."""

    def forward(self, x):
        product = F.silu(self.gate_proj(x)) * self.up_proj(x)
        self.penalty = product.square().mean()
        return self.down_proj(product)


class Logged(nn.RMSNorm):
    """Which keeps something in a list of its class."""

    log: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__(16, eps=1e-6)

    def forward(self, x):
        self.log.append(x.detach().mean())
        return super().forward(x)


def beside(module: Any) -> Any:
    """What a module has kept."""
    return module.__dict__.get("penalty", 0 * rows()) + sum(getattr(module, "log", ()))


BEYOND = {
    ByLength: "its code asks whether x.shape[0] > 6",
    ByNamedLength: "its code asks whether count > 6",
    ByGradients: "its code goes by no_grad",
    ByPlace: "its code goes by a place that no probe has: gate[:6]",
    ByNamedPlace: "its code goes by a place that no probe has: gate[:CUT]",
    ByItsPlace: "its code goes by a place that no probe has: gate[:self.cut]",
    ByCount: "its code goes by a place that no probe has: min(16, gate.shape[-1])",
    Penalized: "its code sets self.penalty",
    Logged: "a run of its code may leave a trace: Logged.forward calls append, and it reads log, a list",
}


@pytest.mark.parametrize("make", BEYOND)
def test_what_no_run_on_a_few_rows_shows_runs_as_it_is(make):
    op = "rms_norm" if make is Logged else "swiglu"

    def outcome(model: Around) -> list[torch.Tensor]:
        Logged.log.clear()
        x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = model(x)
        (out.square().mean() + beside(model.inner).mean()).backward()
        return [out, x.grad]

    torch.manual_seed(0)
    model = Around(make())
    there = set(vars(model.inner))
    with apply_npu_kernels(model, ops=[op]) as kernels:
        assert set(vars(model.inner)) == there
        assert [left.reason for left in kernels.report().left_alone] == [BEYOND[make]]
        found = outcome(model)
    assert all(map(torch.equal, found, outcome(model)))


def test_a_configuration_that_is_saved_is_none_that_is_changed():
    """Saving a model writes its dtype there."""
    model = Around(Configured())
    with apply_npu_kernels(model, ops=["swiglu"]) as kernels:
        model.inner.config.dtype = "float32"
        model(rows())
        assert kernels.report().ran == {"swiglu": 1}


def scale_in_place(model: Any) -> None:
    model.model.embed_tokens.embed_scale.fill_(0.5)


def another_scale(model: Any) -> None:
    model.model.embed_tokens.embed_scale = torch.tensor(0.5)


def in_each(path: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            setattr(layer.get_submodule(path), name, value)

    return change


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


MODELS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a scale, in place": ("gemma3", scale_in_place),
    "another scale": ("gemma3", another_scale),
    "soft cap of the head": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 0.5)),
    "scale of the head": ("cohere", set_to("logit_scale", 3.0)),
    "divisor of the head": ("granite", lambda model: setattr(model.config, "logits_scaling", 0.5)),
    "scale of attention": ("llama", in_each("self_attn", "scaling", 2.0)),
    "soft cap of attention": ("gemma2", in_each("self_attn", "attn_logit_softcapping", 0.1)),
    "multiplier of residuals": ("granite", in_each("", "residual_multiplier", 0.3)),
    "scale of rotations": ("llama", set_to("model.rotary_emb.attention_scaling", 2.0)),
    "frequencies": ("llama", other_frequencies),
    "epsilons": ("llama", in_each("post_attention_layernorm", "variance_epsilon", 0.5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_set_later_counts_in_models(name):
    family, change = MODELS[name]
    model, inputs = small_model(family, initializer_range=0.2), padded()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with apply_npu_kernels(model, ops=PATCHES):
        before = loss_of(model, inputs)
        change(model)
        found = values(model, inputs, loss_of)
    change(plain)
    change(exact)
    expected, truth = values(plain, inputs, loss_of), values(exact, inputs, loss_of)
    moved = rounded(lambda: values(plain, inputs, loss_of))
    assert not torch.allclose(before, expected["loss"], rtol=1e-4)
    for name, reference in expected.items():
        assert_as_close(found[name], reference, truth[name], name, [m[name] for m in moved])


EXCHANGED = {
    "LlamaRMSNorm": {
        "rms_norm": "its class has been given another forward",
        "add_rms_norm": "the class of a norm has been given another forward",
    },
    "LlamaMLP": {"swiglu": "its class has been given another forward"},
    "LlamaDecoderLayer": {},
    "apply_rotary_pos_emb": {},
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_code_that_somebody_exchanges_in_the_models_module_is_what_runs(monkeypatch, name):
    """As libraries do that bring kernels of their own."""
    model, plain, inputs = small_model("llama"), small_model("llama"), padded()
    with apply_npu_kernels(model, ops=[op for op in PATCHES if op != "varlen_attention"]) as kernels:
        before = loss_of(model, inputs)
        own = getattr(modeling_llama, name)
        if name == "apply_rotary_pos_emb":
            monkeypatch.setattr(
                modeling_llama, name, lambda *args, **kwargs: tuple(9 * t for t in own(*args, **kwargs))
            )
        else:
            forward = own.forward
            monkeypatch.setattr(own, "forward", lambda *args, **kwargs: 2 * forward(*args, **kwargs))
        found = loss_of(model, inputs)
        assert {each.op: each.reason for each in kernels.report().declined} == EXCHANGED[name]
    assert not torch.allclose(before, found, rtol=1e-5)
    torch.testing.assert_close(found, loss_of(plain, inputs))


class Draws(nn.Module):
    def forward(self, x):
        return x * random.random()


class DrawsByNumpy(nn.Module):
    def forward(self, x):
        return x * np.random.rand()


class Imports(nn.Module):
    def forward(self, x):
        import math

        return x * math.pi


class GoesByASwitch(nn.Module):
    def forward(self, x):
        return x * 2 if torch.get_default_dtype() is torch.float32 else x


class ReadsAnIterator(nn.Module):
    def forward(self, x):
        return x * next(ENDLESS)


ENDLESS = itertools.count()


class CallsAMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = Called(SimpleNamespace(value=1.0)).method

    def forward(self, x):
        return x * self.factor()


class CallsAPartial(CallsAMethod):
    def __init__(self):
        super().__init__()
        self.factor = functools.partial(lambda numbers: numbers[0], [1.0])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Draws, "its code uses random"),
        (DrawsByNumpy, "its code uses numpy.random"),
        (Imports, "its code imports math when it is called"),
        (GoesByASwitch, "its code goes by torch's get_default_dtype"),
        (CallsAMethod, "its code reads factor, a method, which is not compared"),
        (CallsAPartial, "its code reads factor, a partial, which is not compared"),
        (ReadsAnIterator, "its code reads ENDLESS, a count, which is not compared"),
    ],
)
def test_what_is_read_and_not_compared(kind, reason):
    assert unseen(kind()) == reason
