"""Experts of transformers' interface: what they are found to compute, that the op computes it, and what stays."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from npu_trainer_kernels import apply_npu_kernels, backends
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.modules import experts as experts_module
from tests.closeness import assert_as_close, rounded, rounded_if_needed
from tests.models import SMALL, assert_outcome_close, batch, loss_and_gradients, module_of, small_model
from tests.patching.padded import padded

OP = "moe_experts"
EXPERTS, HIDDEN, INNER, TOKENS = 6, 16, 24, 13
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")

# Name -> class, what differs from the sizes below, the form that is to be found.
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "silu": (Qwen3MoeExperts, {}, "silu, joined=halves"),
    "gelu": (Qwen3MoeExperts, {"hidden_act": "gelu"}, "gelu, joined=halves"),
    "gelu_tanh": (Qwen3MoeExperts, {"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh, joined=halves"),
    "gpt-oss": (
        GptOssExperts, {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        "silu, alpha=1.702, limit=7.0, offset=1.0, joined=interleaved, transposed, biases",
    ),
    "relu2": (NemotronHExperts, {"mlp_hidden_act": "relu2"}, "relu2, no gate"),
    "own activation": (NemotronHExperts, {"mlp_hidden_act": "tanh"}, "its own gate"),
}  # fmt: skip
# A decorator gives it that where its experts come through the interface, which they did not always.
if hasattr(AriaExperts, "_apply_gate"):
    KINDS["transposed"] = AriaExperts, {}, "silu, joined=halves, transposed"
if muse_spark := module_of("muse_spark"):
    form = "silu, joined=halves, a norm behind each expert"
    KINDS["a norm"] = muse_spark.MuseSparkExperts, {"post_norm_eps": 1e-6}, form
if beam := module_of("beam"):
    KINDS["own gate"] = beam.BeamExperts, {}, "its own gate"


def those(*kinds: str) -> list[str]:
    """Without those that the installed transformers does not have."""
    return [kind for kind in kinds if kind in KINDS]


class Around(nn.Module):
    """A model of one experts module."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args, **kwargs):
        return self.experts(*args, **kwargs)


def made(kind: str, implementation: str = "eager", cls: Any = None) -> Around:
    """Weights at which everything counts: limits are reached, biases are as large as what they are added to."""
    of, options, _ = KINDS[kind]
    config = SimpleNamespace(
        **{
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
            **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN),
            **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER),
            "hidden_act": "silu", "moe_latent_size": None, "_experts_implementation": implementation, **options,
        }
    )  # fmt: skip
    experts = (cls or of)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Around(experts)


def routed(dtype: torch.dtype = torch.float32, tokens: int = TOKENS, k: int = 2) -> tuple[torch.Tensor, ...]:
    """Rows, experts and routing weights; the last expert is chosen by nobody."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:k] for _ in range(tokens)] or [torch.empty(k)])
    weights = torch.rand(tokens, k, generator=generator).softmax(-1).to(dtype)
    return x, ids.long()[:tokens], weights


def values(
    model: Around, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, autocast: bool = False
) -> dict[str, torch.Tensor]:
    """What comes out, and every gradient."""
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x, ids, weights)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    out.backward(upstream)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **gradients}


def truth_of(model: Around, *given: torch.Tensor) -> dict[str, torch.Tensor]:
    exact = copy.deepcopy(model).double()
    exact.experts.config._experts_implementation = "eager"
    return values(exact, *(t.double() if t.is_floating_point() else t for t in given))


def declined(kernels) -> dict[str, int]:
    return {each.reason: each.calls for each in kernels.report().declined if each.op == OP}


def left_alone(kernels) -> str | None:
    return next((each.reason for each in kernels.report().left_alone if each.op == OP), None)


def assert_served(model: Around, *given: torch.Tensor, autocast: bool = False) -> None:
    """The op runs, and what comes out and every gradient are the module's own."""
    plain = copy.deepcopy(model)
    expected, truth = values(plain, *given, autocast=autocast), truth_of(model, *given)
    moved = rounded_if_needed(lambda: values(plain, *given, autocast=autocast))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = values(model, *given, autocast=autocast)
        assert (kernels.report().ran, declined(kernels)) == ({OP: 1}, {}), kernels.report().text(full=True)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_as_close(value, expected[name], truth[name], name, moved(name))


# ---------------------------------------------------------------------------------------------------------------------
# What is found, and that it is what the op computes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found(kind):
    with apply_npu_kernels(made(kind), ops=[OP]) as kernels:
        (replaced,) = kernels.report().replaced
    assert (replaced.module, replaced.op, replaced.detail) == ("experts", OP, KINDS[kind][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_the_modules_own(kind, implementation, dtype):
    assert_served(made(kind, implementation).to(dtype), *routed(dtype))


@pytest.mark.parametrize("kind", those("silu", "gpt-oss", "own gate"))
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 3), (7, 1)])
def test_few_rows(kind, tokens, k):
    assert_served(made(kind), *routed(tokens=tokens, k=k))


@pytest.mark.parametrize("kind", those("silu", "gpt-oss", "a norm"))
def test_one_expert_has_all_rows(kind):
    x, ids, weights = routed(k=1)
    assert_served(made(kind), x, torch.full_like(ids, 2), weights)


@pytest.mark.parametrize("kind", those("silu", "gpt-oss", "own gate"))
def test_no_rows(kind):
    model, given = made(kind), routed(tokens=0)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = values(model, *given)
        assert kernels.report().ran == {OP: 1}
    assert found["out"].shape == (0, HIDDEN)
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("kind", those("silu", "transposed", "gpt-oss", "relu2", "a norm", "own gate"))
def test_rows_without_a_home(kind):
    """Under expert parallelism: ids beyond this rank's experts, of weight zero."""
    model, (x, ids, weights) = made(kind, "batched_mm"), routed()
    model.experts._is_expert_parallel = True
    ids[::3, 1] = EXPERTS
    ids[4] = EXPERTS
    weights = weights.masked_fill(ids == EXPERTS, 0.0)

    def own(of: Around, *given: torch.Tensor) -> dict[str, torch.Tensor]:
        found = values(of, *given)
        # In transformers 5.17 the module's own code has a gradient there, for weights that are zeros to the model.
        found["weights"].masked_fill_(ids == EXPERTS, 0.0)
        return found

    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    expected, truth = own(plain, x, ids, weights), own(exact, x.double(), ids, weights.double())
    moved = rounded_if_needed(lambda: own(plain, x, ids, weights))
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = values(model, x, ids, weights)
        assert kernels.report().ran == {OP: 1}
    assert not found["out"][4].any()
    assert not found["weights"][ids == EXPERTS].any()
    for name, value in found.items():
        assert_as_close(value, expected[name], truth[name], name, moved(name))


def test_frozen_weights_get_no_gradient():
    model, given = made("silu"), routed()
    model.requires_grad_(False)
    expected = values(model, *given)
    with apply_npu_kernels(model, ops=[OP]):
        found = values(model, *given)
    assert found.keys() == expected.keys() == {"out", "x", "weights"}


@pytest.mark.parametrize("kind", those("own gate"))
def test_an_unknown_gate_is_the_models_own_code(monkeypatch, kind):
    seen, cls = [], KINDS[kind][0]
    original = cls._apply_gate
    monkeypatch.setattr(cls, "_apply_gate", lambda self, both: seen.append(len(both)) or original(self, both))
    model, given = made(kind), routed()
    with apply_npu_kernels(model, ops=[OP]):
        seen.clear()
        values(model, *given)
    assert sum(seen) >= 2 * TOKENS


# ---------------------------------------------------------------------------------------------------------------------
# What is left alone: each is a fault that the flags do not show
# ---------------------------------------------------------------------------------------------------------------------


class WeightedTwice(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.square())


class NextExpert(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, (top_k_index + 1) % self.num_experts, top_k_weights)


class Normed(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights / top_k_weights.sum(-1, keepdim=True))


class Scaled(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 1.001 * super().forward(hidden_states, top_k_index, top_k_weights)


class Interleaved(Qwen3MoeExperts):
    """Its own code and its gate do not agree."""

    def _apply_gate(self, both):
        return self.act_fn(both[..., ::2]) * both[..., 1::2]


class NoBias(GptOssExperts):
    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        with torch.no_grad():
            self.down_proj_bias.zero_()
        return super().forward(hidden_states, router_indices, routing_weights)


class HalfForMany(Qwen3MoeExperts):
    """And keeps count."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.load = torch.bincount(top_k_index.flatten(), minlength=self.num_experts)
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return out / 2 if len(hidden_states) > TOKENS - 1 else out


FAULTS = {"silu": (WeightedTwice, NextExpert, Normed, Scaled, Interleaved), "gpt-oss": (NoBias,)}


@pytest.mark.parametrize(("kind", "cls"), [(kind, cls) for kind, faults in FAULTS.items() for cls in faults])
def test_what_computes_something_else_is_left_alone(kind, cls):
    model, given = made(kind, cls=cls), routed()
    expected = values(model, *given)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        other = "computes something else than its flags say"
        assert ("NoBias.forward calls zero_" if cls is NoBias else other) in left_alone(kernels)
        assert all(torch.equal(v, expected[name]) for name, v in values(model, *given).items())


def test_what_its_flags_do_not_say_is_left_alone():
    model, given = made("silu", cls=HalfForMany), routed()
    expected = values(model, *given)
    load = model.experts.__dict__.pop("load")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert "a run of its code may leave a trace: HalfForMany.forward sets load" in left_alone(kernels)
        assert all(torch.equal(v, expected[name]) for name, v in values(model, *given).items())
    assert torch.equal(model.experts.load, load)


def test_what_does_not_come_through_the_interface():
    config = SimpleNamespace(num_local_experts=2, intermediate_size=8, hidden_size=8, hidden_act="silu")
    for experts, why in (
        (Llama4TextExperts(config), "does not come through transformers' experts interface"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "modules of their own"),
    ):
        with apply_npu_kernels(Around(experts), ops=[OP]) as kernels:
            assert why in left_alone(kernels)


def test_an_implementation_of_the_users_stays(monkeypatch):
    def mine(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states * 2

    mapping = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "_global_mapping", mapping)
    ALL_EXPERTS_FUNCTIONS.register("mine", mine)
    x, ids, weights = routed()
    model = made("silu", "mine")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert left_alone(kernels) == "its configuration asks for experts_implementation='mine', which stays"
        assert torch.equal(model(x, ids, weights), x * 2)
    # In the place of a stock one, and asked for later.
    model = made("silu", "grouped_mm")
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        mapping["grouped_mm"] = mine
        assert torch.equal(model(x, ids, weights), x * 2)
        model.experts.config._experts_implementation = "mine"
        assert torch.equal(model(x, ids, weights), x * 2)
        assert list(declined(kernels).values()) == [1, 1]
        model.experts.config._experts_implementation = "eager"
        model(x, ids, weights)
        assert kernels.report().ran == {OP: 1}


def test_quantised_weights_are_left_alone():
    model = made("silu")
    for name in ("gate_up_proj", "down_proj"):
        quantised = model.experts._parameters[name].detach().to(torch.float8_e4m3fn)
        model.experts._parameters[name] = nn.Parameter(quantised, requires_grad=False)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert left_alone(kernels) == "its gate_up_proj is quantised (float8_e4m3fn)"


def test_weights_that_are_computed_anew_are_left_alone():
    model = made("silu")
    parametrize.register_parametrization(model.experts, "down_proj", nn.Identity())
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        said = "it has no parameter down_proj (adapters and quantisation put theirs in the place of it)"
        assert left_alone(kernels) == said


def test_a_forward_that_was_set_on_the_instance():
    model = made("silu")
    model.experts.forward = lambda x, ids, weights: x
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert "was set on the instance" in left_alone(kernels)


# ---------------------------------------------------------------------------------------------------------------------
# What is looked at in every call
# ---------------------------------------------------------------------------------------------------------------------


class Special(torch.Tensor):
    """A tensor that is more than its storage, as quantised and sharded ones are."""


def special_weight(model, given):
    model.experts._parameters["down_proj"] = nn.Parameter(model.experts.down_proj.detach().as_subclass(Special))


def special_rows(model, given):
    given[0] = given[0].as_subclass(Special)


def several_dtypes(model, given):
    model.experts.down_proj.data = model.experts.down_proj.data.double()
    model.experts.gate_up_proj.data = model.experts.gate_up_proj.data.double()
    given[0] = given[0].double()


def hooked(model, given):
    model.experts.act_fn = copy.deepcopy(model.experts.act_fn)
    model.experts.act_fn.register_forward_hook(lambda module, args, out: out * 2)


def exchanged(model, given):
    model.experts.act_fn = nn.Tanh()


def gated_otherwise(model, given):
    model.experts._apply_gate = lambda both: both[..., :INNER]


def no_module(model, given):
    del model.experts.act_fn
    model.experts.act_fn = nn.functional.silu


def gate_of_the_class(model, given):
    type(model.experts)._apply_gate = lambda self, both: both[..., :INNER]


def special_ids(model, given):
    given[1] = given[1].as_subclass(Special)


def rows_without_experts(model, given):
    given[0] = torch.cat([given[0], given[0]])


CHANGES = {
    special_weight: "its down_proj is no plain float32, bfloat16 or float16 parameter",
    special_rows: "a Special is no plain tensor",
    several_dtypes: "float64 values",
    hooked: "its act_fn has hooks, or has been exchanged",
    exchanged: "its act_fn has hooks, or has been exchanged",
    gated_otherwise: "its _apply_gate has been changed",
    no_module: "its act_fn has been exchanged",
    gate_of_the_class: "its gate has been exchanged",
    special_ids: "its experts are chosen by no plain int64 or int32 tensor",
    rows_without_experts: "rows, experts and routing weights of shapes that do not go together",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_declined(change):
    def outcome(model) -> torch.Tensor:
        given = list(routed())
        change(model, given)
        return model(*given)

    def fresh() -> Around:
        # A class of its own, which `change` may change; rows without experts are eager code's alone.
        implementation = "eager" if change is rows_without_experts else "batched_mm"
        return made("silu", implementation, type("Mine", (Qwen3MoeExperts,), {}))

    expected = outcome(fresh())
    model = fresh()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert torch.equal(outcome(model), expected)
        assert declined(kernels) == {CHANGES[change]: 1}


def test_biases_of_another_dtype():
    model, plain, given = made("gpt-oss"), made("gpt-oss"), routed()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        for each in (model, plain):
            each.experts.down_proj_bias = nn.Parameter(each.experts.down_proj_bias.detach().bfloat16())
        found, expected = values(model, *given), values(plain, *given)
        assert declined(kernels) == {"its parameters are of several dtypes": 1}
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_arguments_by_name_and_arguments_that_nobody_knows():
    model, (x, ids, weights) = made("silu"), routed()
    plain = copy.deepcopy(model)
    expected, truth = plain(x, ids, weights).detach(), truth_of(model, x, ids, weights)["out"]
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = model(x, top_k_weights=weights, top_k_index=ids).detach()
        assert_as_close(found, expected, truth, "out", lambda: rounded(lambda: plain(x, ids, weights).detach()))
        with pytest.raises(TypeError):
            model(x, ids, weights, 3)
        assert list(declined(kernels)) == ["it is given something else than rows, experts and routing weights"]


def test_routing_weights_in_fp32_over_rows_in_bf16():
    x, ids, weights = routed(torch.bfloat16)
    assert_served(made("silu").to(torch.bfloat16), x, ids, weights.float())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_autocast(implementation):
    assert_served(made("silu", implementation), *routed(), autocast=True)


@pytest.mark.parametrize("kind", ["silu", "gpt-oss"])
def test_grouped_products_know_of_no_autocast(kind):
    """Theirs run in the dtype of the weights, whatever that of the rows is, and so do ours."""
    assert_served(made(kind, "grouped_mm"), *routed(), autocast=True)
    assert_served(made(kind, "grouped_mm"), *routed(torch.bfloat16), autocast=True)
    assert_served(made(kind, "grouped_mm").to(torch.bfloat16), *routed())
    assert_served(made(kind, "grouped_mm").to(torch.bfloat16), *routed(), autocast=True)


def test_eager_experts_of_another_dtype_than_their_rows_raise_as_they_did():
    model, (x, ids, weights) = made("silu").to(torch.bfloat16), routed()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        with pytest.raises(RuntimeError):
            model(x, ids, weights)
        assert declined(kernels) == {"its weights and its rows are of two dtypes": 1}


def test_a_call_reads_the_configuration_once():
    """One of transformers looks every name up in Python, which takes half as long as a kernel's launch."""

    class Counted:
        reads = 0

        @property
        def _experts_implementation(self):
            self.reads += 1
            return "grouped_mm"

    model, given = made("silu", "grouped_mm").to(torch.bfloat16), routed(torch.bfloat16)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        model.experts.config = config = Counted()
        model(*given)
        assert (config.reads, kernels.report().ran) == (1, {OP: 1})


def test_compiled_models_run_their_own_code():
    model, given = made("silu", "batched_mm"), routed()
    expected = model(*given)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(*given), expected)
        assert kernels.report().ran == {OP: 0}


def test_a_device_where_nothing_was_measured(monkeypatch):
    """One line says so, of models that have experts."""
    own = backends.keeps_plain

    def keeps_plain(op, *args, **kwargs):
        return "not timed there; by name" if op == OP else own(op, *args, **kwargs)

    monkeypatch.setattr(backends, "keeps_plain", keeps_plain)
    with apply_npu_kernels(small_model("qwen3-moe")) as kernels:
        assert str(kernels.report()).count("\n  moe_experts: not timed there; by name\n") == 1
    with apply_npu_kernels(small_model("llama")) as kernels:
        assert OP not in str(kernels.report())
    with apply_npu_kernels(small_model("qwen3-moe"), ops=[OP]) as kernels:
        assert len(kernels.report().replaced) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")


def adapted(family: str, **targets: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MIXTRAL) if family == "mixtral" else small_model(family, output_router_logits=False)
    torch.manual_seed(0)
    return get_peft_model(model.train(), LoraConfig(r=2, init_lora_weights=False, **targets))


PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["q_proj"]}
ONE_PARAMETER = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["q_proj"]}


def gradients_of_adapters(of: Any) -> dict[str, torch.Tensor]:
    of.zero_grad()
    loss = of(**batch()).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in of.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3-moe", PARAMETERS),
        ("qwen3-moe", ONE_PARAMETER),
        ("qwen3-moe", {"target_modules": "all-linear"}),
        ("mixtral", {"target_modules": "all-linear"}),
    ],
    ids=["both parameters", "one parameter", "all-linear", "mixtral all-linear"],
)
def test_adapters_on_expert_parameters(family: str, targets: dict[str, Any]) -> None:
    """While they are called a module has the sum of weight and adapters in the place of a parameter."""
    model, plain = adapted(family, **targets), adapted(family, **targets)
    expected, truth = gradients_of_adapters(plain), gradients_of_adapters(adapted(family, **targets).double())
    assert any("experts" in name and value.abs().max() > 0 for name, value in expected.items())
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        found = gradients_of_adapters(model)
        assert (kernels.report().ran, declined(kernels)) == ({OP: 2}, {})
        assert "ParamWrapper" not in kernels.report().text(full=True)
        # Switched off, the weights are the module's own again.
        with model.disable_adapter():
            model(**batch())
        assert kernels.report().ran == {OP: 4}
    assert found.keys() == expected.keys()
    moved = rounded_if_needed(lambda: gradients_of_adapters(plain))
    for name, value in found.items():
        assert_as_close(value, expected[name], truth[name], name, moved(name))
    for name, value in gradients_of_adapters(model).items():  # nothing is left behind
        assert torch.equal(value, expected[name])


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_other_parametrisations_run_the_models_own_code():
    """They may compute another weight each time that they are read."""
    model = small_model("qwen3-moe", output_router_logits=False)
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        for layer in model.model.layers:
            parametrize.register_parametrization(layer.mlp.experts, "down_proj", Doubled())
        model(**batch())
        said = "it has no parameter down_proj (adapters and parametrisations put theirs in the place of it)"
        assert declined(kernels) == {said: 2}
        for layer in model.model.layers:
            parametrize.remove_parametrizations(layer.mlp.experts, "down_proj", leave_parametrized=False)


def test_adapters_elsewhere_leave_frozen_experts_to_the_op():
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        torch.manual_seed(0)
        model = small_model("qwen3-moe", output_router_logits=False)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))

    model, plain = make(), make()
    expected, truth = plain(**batch()).loss.detach(), make().double()(**batch()).loss.detach()
    with apply_npu_kernels(model, ops=[OP]) as kernels:
        loss = model(**batch()).loss
        loss.backward()
        assert kernels.report().ran == {OP: 2}
    assert_as_close(loss.detach(), expected, truth, "loss", lambda: rounded(lambda: plain(**batch()).loss.detach()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_routing_is_the_same_when_layers_are_recomputed(monkeypatch, reentrant):
    seen: list[torch.Tensor] = []
    original = experts_module.moe_experts
    monkeypatch.setattr(
        experts_module, "moe_experts", lambda x, ids, *a, **k: seen.append(ids) or original(x, ids, *a, **k)
    )
    # A reentrant checkpoint's first forward is without gradients, and so are the router's logits that a loss reads.
    model = small_model("qwen3-moe", output_router_logits=not reentrant)
    with apply_npu_kernels(model, ops=[OP]):
        seen.clear()
        # Checkpointed layers have no cache, whose keys have other strides.
        given = {**batch(), "use_cache": False}
        expected = loss_and_gradients(model, given)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        first = [*seen, *reversed(seen)]
        seen.clear()
        found = loss_and_gradients(model, given)
    assert [ids.tolist() for ids in seen] == [ids.tolist() for ids in first]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("router_logits", [False, True])
def test_a_padded_batch_and_the_loss_of_the_router(router_logits):
    """The auxiliary loss is that of the model, which leaves padding out of it."""

    def make() -> Any:
        return small_model("qwen3-moe", output_router_logits=router_logits, router_aux_loss_coef=10.0)

    def outcome(model: Any) -> list[torch.Tensor]:
        return loss_and_gradients(model, padded())

    plain = make()
    expected, truth = outcome(plain), outcome(make().double())
    assert make()(**padded()).get("aux_loss") is not None or not router_logits
    model = make()
    with apply_npu_kernels(model, ops=PATCHES) as kernels:
        found = outcome(model)
        ran = kernels.report().ran
        assert (ran[OP], ran["varlen_attention"]) == (2, 1)
    assert_outcome_close(model, found, expected, truth, lambda: outcome(plain))


class InDouble(nn.Module):
    """As an adapter in fp64 computes a weight."""

    def forward(self, weight):
        return weight.double()


def test_adapted_weights_of_another_dtype(monkeypatch):
    module = nn.Linear(2, 3)
    parametrize.register_parametrization(module, "weight", InDouble(), unsafe=True)
    monkeypatch.setattr(experts_module, "_ADAPTERS", __name__)
    reason = experts_module._no_weights(module, "weight")
    assert reason == "its adapted weights are no plain float32, bfloat16 or float16 tensors"
