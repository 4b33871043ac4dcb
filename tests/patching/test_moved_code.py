"""Code of models that says the same in other words, as releases of transformers do, and code that nearly does."""

import copy

import pytest
import torch
from torch import nn

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.body.mixers import _mixes_tokens
from npu_trainer_kernels.patching.modules.rotation_forms import rope_form
from tests.closeness import assert_as_close, rounded_if_needed
from tests.models import in_double

HIDDEN = 48


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.eps = 1e-6

    def forward(self, states):
        x = states.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(states.dtype)


class Layer(nn.Module):
    """A layer whose subclasses have the residual add and the norm behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.proj = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))


class Between(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        x = x + out
        noted = None
        kept = x
        width: int = 3
        x = self.second(x)
        return kept + self.proj(x), (noted, width)


class OtherNames(Layer):
    def forward(self, x):
        total = self.proj(self.first(x)) * 1.0
        total = x + total
        normed = self.second(total)
        return total + self.proj(normed), None


class ByName(Layer):
    def forward(self, x):
        out = self.proj(self.first(states=x))
        x = out + x
        kept = x
        x = self.second(states=x)
        return kept + self.proj(x), None


class ChangedBehind(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        x = x + out
        kept = x
        kept.mul_(2.0)
        x = self.second(x)
        return kept + self.proj(x), None


class SetBehind(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        x = x + out
        kept = x
        x = x * 2.0
        x = self.second(x)
        return kept + self.proj(x), None


class NotKept(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        x = x + out
        kept = out
        x = self.second(x)
        return kept + self.proj(x), None


class NormedBefore(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        out = self.second(out)
        x = x + out
        kept = x
        return kept + self.proj(x), None


class InPlace(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        x = x + out
        kept = x
        kept += 1.0
        x = self.second(x)
        return kept + self.proj(x), None


class Viewed(Layer):
    def forward(self, x):
        out = self.proj(self.first(x))
        x = x + out
        kept = x
        kept[:1] = 0.0
        x = self.second(x)
        return kept + self.proj(x), None


def trained(layer, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(2, 3, HIDDEN).to(dtype).requires_grad_()
    out, _ = layer(x * 1.0)
    out.square().mean().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    return {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("kind", [Between, OtherNames, ByName])
def test_a_residual_add_in_other_words_is_served(kind):
    torch.manual_seed(1)
    layer = kind()
    plain, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
    with apply_npu_kernels(layer, ops=["add_rms_norm", "rms_norm"]) as kernels:
        found = trained(layer)
        assert kernels.report().ran["add_rms_norm"] == 1
    with in_double():
        truth = trained(exact, torch.float64)
    expected, moved = trained(plain), rounded_if_needed(lambda: trained(plain))
    for name, value in found.items():
        assert_as_close(value, expected[name], truth[name], name, moved(name))


@pytest.mark.parametrize("kind", [ChangedBehind, SetBehind, NotKept, NormedBefore, InPlace, Viewed])
def test_a_residual_add_that_is_another_one_is_not(kind):
    torch.manual_seed(1)
    layer = kind()
    plain = trained(layer)
    with apply_npu_kernels(layer, ops=["add_rms_norm"]) as kernels:
        found = trained(layer)
        reasons = {each.reason for each in kernels.report().left_alone}
    assert reasons == {"its forward has no residual add right before a norm"}
    assert all(torch.equal(value, plain[name]) for name, value in found.items())


def test_the_call_keeps_no_tensor_alive():
    class Looks(Layer):
        def forward(self, x):
            x = x + self.proj(self.first(x))
            return x, None

    class Counts(Layer):
        def forward(self, x):
            out = self.proj(self.first(x))
            x = x + out
            kept = x
            x = self.second(x)
            return kept + self.proj(x), sorted(locals())

    for kind in (Looks, Counts):
        layer = kind()
        with torch.no_grad(), apply_npu_kernels(layer, ops=["add_rms_norm"]):
            names = layer(torch.randn(2, 3, HIDDEN))[1]
    assert names == ["kept", "out", "self", "x"]


def test_a_module_that_is_given_its_tensor_by_name_is_served():
    layer = nn.ModuleList([Norm()])
    x = torch.randn(2, 3, HIDDEN, requires_grad=True)
    with apply_npu_kernels(layer, ops=["rms_norm"]) as kernels:
        assert torch.equal(layer[0](states=x), layer[0](x))
        assert kernels.report().ran["rms_norm"] == 2
        with pytest.raises(TypeError):
            layer[0](other=x)


# ---------------------------------------------------------------------------------------------------------------------
# Rotations
# ---------------------------------------------------------------------------------------------------------------------


def half(given):
    a, b = given.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turned(a, b, c, d, at=1):
    c, d = c.unsqueeze(at), d.unsqueeze(at)
    return a * c + half(a) * d, b * c + half(b) * d


def turned_sines_first(a, b, s, c, at=1):
    return turned(a, b, c, s, at)


def turned_one(a, c, s, at=1):
    c, s = c.unsqueeze(at), s.unsqueeze(at)
    return a * c + half(a) * s


def turned_complex(a, b, freqs):
    def each(x):
        x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x_ * freqs[:, :, None, :]).flatten(3).type_as(x)

    return each(a), each(b)


def turned_and_scaled(a, b, c, d, at=1):
    q, k = turned(a, b, c, d, at)
    return q, k * 1.25


def turned_backwards(a, b, c, d, at=1):
    return turned(a, b, c, -d, at)


def test_a_rotation_is_known_by_what_it_computes():
    form = rope_form(turned)
    assert form is not None
    assert (form.roles, form.unsqueezes, form.dimension) == (("q", "k", "cos", "sin"), True, "at")
    assert rope_form(turned_sines_first).roles == ("q", "k", "sin", "cos")
    assert rope_form(turned_one).roles == ("q", "cos", "sin")
    assert rope_form(turned_complex).roles == ("q", "k", "freqs")
    assert rope_form(turned_and_scaled) is None
    assert rope_form(turned_backwards) is None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32)
        self.head_dim = 16

    def heads(self, x):
        shape = (*x.shape[:-1], -1, 16)
        return self.q(x).view(shape).transpose(1, 2), self.k(x).view(shape).transpose(1, 2)


class Calls(Attention):
    def forward(self, x, tables):
        q, k = self.heads(x)
        cos, sin = tables
        q, k = turned(q, b=k, c=cos, d=sin, at=1)
        return q @ k.transpose(2, 3)


class InItsCode(Attention):
    def forward(self, x, tables):
        q, k = self.heads(x)
        cos, sin = (each.unsqueeze(1) for each in tables)
        q, k = q * cos + half(q) * sin, k * cos + half(k) * sin
        return q @ k.transpose(2, 3)


@pytest.mark.parametrize(
    ("kind", "ran", "reasons"),
    [(Calls, 1, set()), (InItsCode, 0, {"its forward has cosines and sines, and calls no function that rope knows"})],
)
def test_a_rotation_under_another_name_is_served_and_one_without_a_function_is_named(kind, ran, reasons):
    torch.manual_seed(0)
    attention = kind()
    x, tables = torch.randn(2, 5, HIDDEN), (torch.randn(1, 5, 16), torch.randn(1, 5, 16))
    plain = attention(x, tables)
    with apply_npu_kernels(attention, ops=["rope"]) as kernels:
        assert torch.equal(attention(x, tables), plain)
        assert kernels.report().ran.get("rope", 0) == ran
        assert {each.reason for each in kernels.report().left_alone} == reasons


# ---------------------------------------------------------------------------------------------------------------------
# Modules that mix tokens
# ---------------------------------------------------------------------------------------------------------------------


class MixesByMask(nn.Module):
    def forward(self, x, causal_mask_given=None): ...


class MixesByPositions(nn.Module):
    def forward(self, x, rotary_positions=None): ...


class MixesByCache(nn.Module):
    def forward(self, x, cache=None): ...


class WorksOnTokens(nn.Module):
    def forward(self, hidden_states, residual=None): ...


@pytest.mark.parametrize(
    ("kind", "mixes"), [(MixesByMask, True), (MixesByPositions, True), (MixesByCache, True), (WorksOnTokens, False)]
)
def test_a_mixer_is_known_by_masks_positions_and_caches_of_any_name(kind, mixes):
    assert _mixes_tokens(kind()) == mixes
