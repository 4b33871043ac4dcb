"""Gated MLPs: when `down_proj` joins the op, and that nobody misses being called or finds his tensors overwritten."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from npu_trainer_kernels import apply_npu_kernels, device
from npu_trainer_kernels.patching.modules.mlps import GatedMlpPatch, is_bare_linear
from tests.closeness import assert_as_close, rounded, rounded_if_needed
from tests.conftest import DEVICE
from tests.models import batch, small_model
from tests.pairs import pairs

BACKENDS = ["swiglu=torch", "swiglu=triton"]


class Adapted(nn.Linear):
    """As adapters and quantised layers are: a linear layer that does something more."""

    def forward(self, x):
        return super().forward(x) * 1.5


def adapt(layer: nn.Linear) -> None:
    layer.__class__ = Adapted


def hook(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda module, args, output: output * 1.5)


def pre_hook(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def backward_hook(layer: nn.Linear) -> None:
    layer.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 1.5 for g in inputs))


def own_forward(layer: nn.Linear) -> None:
    original = layer.forward
    layer.forward = lambda x: original(x) * 1.5


def parametrise(layer: nn.Linear) -> None:
    class Larger(nn.Module):
        def forward(self, weight):
            return weight * 1.5

    nn.utils.parametrize.register_parametrization(layer, "weight", Larger())


CHANGES = [adapt, hook, pre_hook, backward_hook, own_forward, parametrise]


def llama():
    return small_model("llama").to(DEVICE)


def loss_of(model):
    return model(**{name: tensor.to(DEVICE) for name, tensor in batch().items()}).loss


def gradients(model):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def changed(change, projection):
    model = llama()
    for layer in model.model.layers:
        change(getattr(layer.mlp, projection))
    return model


@pytest.mark.parametrize(
    ("change", "projection", "backend"),
    pairs(CHANGES, ["gate_proj", "up_proj", "down_proj"], BACKENDS),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_is_done_to_a_projection_after_the_patch_is_done(change, projection, backend):
    plain = changed(change, projection)
    expected, moved = gradients(plain), rounded_if_needed(lambda: gradients(plain))
    truth = gradients(changed(change, projection).double())
    model = llama()
    with apply_npu_kernels(model, ops=["swiglu"], backend=backend):
        for layer in model.model.layers:
            change(getattr(layer.mlp, projection))
        assert not is_bare_linear(getattr(model.model.layers[0].mlp, projection))
        for i, (actual, reference, exact) in enumerate(zip(gradients(model), expected, truth, strict=True)):
            assert_as_close(actual, reference, exact, f"{change.__name__} of {projection}", moved(i))


def by_name(mlp, x):
    return mlp(x=x)


def in_two_dtypes(mlp, x):
    mlp.up_proj.register_forward_hook(lambda module, args, output: output.bfloat16())
    return mlp(x)


CALLS = {
    in_two_dtypes: "its projections return no plain tensors of one dtype",
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls_that_are_the_models_own(call):
    def outcome(mlp):
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
        out = call(mlp, x)
        out.square().mean().backward()
        return [out.detach(), x.grad, *(p.grad for p in mlp.parameters())]

    mlp = llama().model.layers[0].mlp
    with apply_npu_kernels(mlp, ops=["swiglu"]) as kernels:
        found = outcome(mlp)
        assert {each.reason: each.calls for each in kernels.report().declined} == {CALLS[call]: 1}
    assert all(map(torch.equal, found, outcome(llama().model.layers[0].mlp)))


def test_a_call_by_name_is_served():
    mlp, x = llama().model.layers[0].mlp, torch.ones(3, 48, device=DEVICE)
    with apply_npu_kernels(mlp, ops=["swiglu"]) as kernels:
        found = by_name(mlp, x)
        assert torch.equal(found, mlp(x))
        assert (kernels.report().ran, kernels.report().declined) == ({"swiglu": 2}, [])
        with pytest.raises(TypeError):
            mlp(x, x)
        assert [each.reason for each in kernels.report().declined] == ["more than one tensor is given"]
    truth = copy.deepcopy(mlp).double()(x.double())
    assert_as_close(found, mlp(x), truth, "the MLP", rounded_if_needed(lambda: [mlp(x)])(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_hook_has_seen_stays_as_it_was(backend):
    """A projection's output is overwritten in backward only where nobody can have kept it."""
    model, seen = llama(), []
    with apply_npu_kernels(model, ops=["swiglu"], backend=backend):
        mlp = model.model.layers[0].mlp
        mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append((output, output.detach().clone())))
        gradients(model)
    ((kept, copy),) = seen
    assert torch.equal(kept, copy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_backward_of_a_kept_graph(backend):
    model = llama()
    with apply_npu_kernels(model, ops=["swiglu"], backend=backend):
        loss = loss_of(model)
        runs = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=keep) for keep in (True, True, False)]
    assert all(torch.equal(a, b) for later in runs[1:] for a, b in zip(runs[0], later, strict=True))


def kept_by(mlp, x) -> int:
    """How many tensors as wide as the gate it keeps for backward."""
    kept = {}

    def pack(t):
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mlp(x)
    return sum(t.shape == (*x.shape[:-1], mlp.gate_proj.out_features) for t in kept.values())


def test_one_tensor_less_is_kept_for_backward():
    model = llama()
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, mlp.gate_proj.in_features, device=DEVICE, requires_grad=True)
    # silu(gate) and the product besides gate and up; gate and up alone.
    assert kept_by(mlp, x) == 4
    with apply_npu_kernels(model, ops=["swiglu"], backend="swiglu=triton"):
        assert kept_by(mlp, x) == 2
    assert kept_by(mlp, x) == 4


class ByTurns(nn.Module):
    """One projection makes gate and up, element by element."""

    def __init__(self, width):
        super().__init__()
        self.act = nn.SiLU()
        self.gate_up, self.down = nn.Linear(8, 2 * width, bias=False), nn.Linear(width, 8, bias=False)

    def forward(self, x):
        both = self.gate_up(x)
        return self.down(self.act(both[..., ::2]) * both[..., 1::2])


@pytest.mark.parametrize(("width", "served"), [(12288, True), (18432, False)])
def test_what_waits_too_often_on_an_npu_is_left_to_the_model_by_name(width, served):
    patch, module = GatedMlpPatch(), ByTurns(width)
    form = patch.recognise(module, SimpleNamespace(tiled_mlp=0))
    assert form.product.joined == "interleaved"
    with device.use_chip("Ascend910B4"):
        reason, asked = (patch.declines(SimpleNamespace(form=form, backend=b), module, torch.ones(2, 8))
                         for b in (None, "triton"))  # fmt: skip
    expected = f"gate and up by turns, of {width} columns each: above 12288 the kernel waits too often on Ascend910B4"
    assert (reason, asked) == (None if served else expected, None)


class WithoutLeaf(nn.Module):
    """As LFM2 has it: three projections, and a function of torch between them."""

    def __init__(self, gated=True):
        super().__init__()
        self.w1, self.w3 = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.w2, self.gated = nn.Linear(12, 8, bias=False), gated

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x) if self.gated else self.w1(x) + self.w3(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_activation_needs_no_module_of_its_own(backend):
    module, x = nn.Sequential(WithoutLeaf()).to(DEVICE), torch.randn(3, 5, 8, device=DEVICE)
    plain = copy.deepcopy(module)
    expected, exact = plain(x), copy.deepcopy(module).double()(x.double())
    with apply_npu_kernels(module, backend=backend, ops=("swiglu",)) as kernels:
        found = module(x)
        assert [(site.op, site.ran) for site in kernels.report().sites] == [("swiglu", 1)]
    assert_as_close(found, expected, exact, "y", lambda: rounded(lambda: plain(x)))


def test_three_projections_that_are_no_gated_mlp_are_named():
    module = nn.Sequential(WithoutLeaf(gated=False))
    with apply_npu_kernels(module, ops=("swiglu",)) as kernels:
        (left,) = kernels.report().left_alone
    assert left.reason == "it does not compute down(act(gate(x)) * up(x)) with an act that swiglu knows"
