"""Attention inside segments: values and gradients against a masked softmax over the whole packed row."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from npu_trainer_kernels import ops
from npu_trainer_kernels.ops import Segments, Shared, _segment_kernels, varlen_attention
from tests.closeness import assert_op_close
from tests.ops.test_shared_rows import Waits

# The package's name for it is the function.
op = import_module("npu_trainer_kernels.ops.varlen_attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and the reference
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Queries' lengths, and for each segment the rows of the packed row that its queries see, its own at the end."""

    queries: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...] | None = None

    @property
    def n(self) -> int:
        return sum(self.queries)

    def segments(self, device: torch.device | str) -> Segments:
        if self.keys is None:
            return Segments.make(self.queries, device)
        index = np.array([row for part in self.keys for row in part])
        shared = Shared.make(index, self.n, device)
        return Segments.make(self.queries, device, [len(part) for part in self.keys], shared)


def tree(*parents: int | None, lengths: tuple[int, ...]) -> Layout:
    """Segments, each of which sees its parent's keys before its own."""
    starts = np.cumsum((0, *lengths))
    keys: list[tuple[int, ...]] = []
    for i, parent in enumerate(parents):
        before = () if parent is None else keys[parent]
        keys.append((*before, *range(int(starts[i]), int(starts[i + 1]))))
    return Layout(lengths, tuple(keys))


LAYOUTS = {
    "one segment": Layout((9,)),
    "one token": Layout((1,)),
    "lengths that vary": Layout((3, 1, 7, 5)),
    "tokens alone": Layout((1, 1, 1)),
    "a prompt that three rows share": tree(None, 0, 0, 0, lengths=(5, 4, 1, 6)),
    "prefixes within prefixes": tree(None, 0, 1, 1, 0, None, 5, lengths=(4, 2, 3, 1, 5, 2, 4)),
}
PLAIN, SHARED = LAYOUTS["lengths that vary"], LAYOUTS["prefixes within prefixes"]
OPTIONS = {
    "causal": {},
    "scale": {"scale": 0.3},
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "a window wider than all": {"window": 100},
    "softcap": {"softcap": 1.5, "scale": 1.0},
    "softcap and window": {"softcap": 2.0, "window": 4},
}
# Several: the gradient of a sink is one number for each, and the reference's error of few numbers is a matter of luck.
HEADS = {"each its own": (8, 8), "groups": (12, 4), "one for all": (6, 1)}


def masked_softmax(q, k, v, layout, *, scale=None, window=None, softcap=None, sinks=None):
    """Every query against every row, with the rows that it does not see masked: no segments, no taking of rows."""
    exact = torch.promote_types(q.dtype, torch.float32)
    n, heads, size = q.shape
    seen = torch.zeros(n, n, dtype=torch.bool)
    start = 0
    for i, length in enumerate(layout.queries):
        rows = range(start, start + length) if layout.keys is None else layout.keys[i]
        for j in range(length):
            last = len(rows) - length + j
            first = 0 if window is None else max(0, last - window + 1)
            seen[start + j, list(rows[first : last + 1])] = True
        start += length
    outs = []
    for head in range(heads):
        of_k = head * k.shape[1] // heads
        scores = (q[:, head] @ k[:, of_k].t()).to(exact) * (size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].to(exact).expand(n, 1)), 1)
        p = scores.softmax(1)[:, :n]
        outs.append(p.to(v.dtype) @ v[:, of_k])
    return torch.stack(outs, 1)


def upstream(outputs):
    (y,) = outputs
    factors = (torch.arange(y.numel(), device=y.device) * 0.37).sin().view(y.shape)
    return (y * factors.to(y.dtype)).sum(dtype=torch.float64 if y.device.type == "cpu" else None)


def tensors(layout, device, dtype=torch.float32, heads=(4, 2), size=8, values=None, sinks=False):
    shapes = [(layout.n, heads[0], size), (layout.n, heads[1], size), (layout.n, heads[1], values or size)]
    given = [torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    if sinks:
        given.append(torch.randn(heads[0], device=device).to(dtype).requires_grad_())
    return given


def check(layout, given, backend="torch", **options):
    """Against the reference of this file, by the rule, with gradients of all that is given."""
    segments = layout.segments(given[0].device)
    if len(given) == 3 and (options.get("window") == 1 or segments.longest_k == 1):
        # Of one score the softmax is 1: the gradients of q and k are zero, and whatever is left of them is rounding.
        given = [given[0].detach(), given[1].detach(), given[2]]

    def ours(q, k, v, sinks=None):
        return varlen_attention(q, k, v, segments, sinks=sinks, backend=backend, **options)

    def reference(q, k, v, sinks=None):
        return masked_softmax(q, k, v, layout, sinks=sinks, **options)

    assert_op_close(ours, reference, given, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_options(layout, options, sinks, device):
    layout = LAYOUTS[layout]
    check(layout, tensors(layout, device, sinks=sinks), **OPTIONS[options])


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("options", ["causal", "window 3", "softcap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [PLAIN, SHARED], ids=["plain", "shared"])
def test_dtypes(layout, dtype, options, sinks, device):
    check(layout, tensors(layout, device, dtype, size=16, sinks=sinks), **OPTIONS[options])


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, sinks, device):
    check(SHARED, tensors(SHARED, device, heads=HEADS[heads], sinks=sinks), window=4)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("size", "values"), [(8, 4), (4, 12), (5, 5), (1, 1)])
def test_sizes_of_heads(size, values, sinks, device):
    check(SHARED, tensors(SHARED, device, size=size, values=values, sinks=sinks))


def test_fp64(device):
    given = [t.double().detach().requires_grad_() for t in tensors(SHARED, device, sinks=True)]
    for options in OPTIONS.values():
        q, k, v, sinks = given
        ours = varlen_attention(q, k, v, SHARED.segments(device), sinks=sinks, **options)
        torch.testing.assert_close(ours, masked_softmax(q, k, v, SHARED, sinks=sinks, **options))


def test_of_one_key_the_value_is_all(device):
    given = tensors(PLAIN, device)
    q, k, v = given
    out = varlen_attention(q, k, v, PLAIN.segments(device), window=1)
    assert torch.equal(out, v.repeat_interleave(2, 1))
    dq, dk, _ = torch.autograd.grad(out, given, torch.randn_like(out))
    # A product over the 8 elements of a head, less the same product in another order, times k or q.
    assert max(dq.abs().max(), dk.abs().max()) < 8 * torch.finfo(torch.float32).eps * 8 * 4


def test_unequal_lengths_without_shared_rows(device):
    """Keys that are given as they are: queries at the end of theirs."""
    q = torch.randn(3 + 2, 4, 8, device=device)
    k, v = (torch.randn(7 + 2, 2, 8, device=device) for _ in range(2))
    segments = Segments.make([3, 2], device, [7, 2])
    whole = torch.cat((torch.randn(4, 4, 8, device=device), q))  # queries for all keys
    expected = masked_softmax(whole, k, v, Layout((7, 2)))[4:]
    torch.testing.assert_close(varlen_attention(q, k, v, segments), expected)


def test_transposed_tensors(device):
    """As attention has them: views of [1, H, n, D]."""
    layout = SHARED
    given = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in tensors(layout, device)]
    assert not any(t.is_contiguous() for t in given)
    expected = varlen_attention(*(t.contiguous() for t in given), layout.segments(device))
    assert torch.equal(varlen_attention(*given, layout.segments(device)), expected)
    check(layout, [t.requires_grad_() for t in given], softcap=2.0)


def test_the_package_reference(device):
    given = tensors(SHARED, device, sinks=True)
    q, k, v, sinks = given
    for options in OPTIONS.values():
        found = ops.varlen_attention_reference(q, k, v, SHARED.segments(device), sinks=sinks, **options)
        torch.testing.assert_close(found, masked_softmax(q, k, v, SHARED, sinks=sinks, **options))


@pytest.mark.parametrize("options", ["causal", "window 3", "softcap"])
def test_the_same_bits_every_time(options, device):
    given = tensors(SHARED, device, sinks=options == "causal")
    segments = SHARED.segments(device)

    def results():
        out = varlen_attention(*given[:3], segments, sinks=given[3] if len(given) > 3 else None, **OPTIONS[options])
        return [out, *torch.autograd.grad(upstream([out]), given)]

    first, *others = (results() for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_segment_alone_has_the_bits_that_it_has_among_others(device):
    q, k, v = (t.detach() for t in tensors(PLAIN, device))
    whole = varlen_attention(q, k, v, PLAIN.segments(device))
    alone = varlen_attention(q[4:11], k[4:11], v[4:11], Layout((7,)).segments(device))
    assert torch.equal(whole[4:11], alone)


def test_dropout(device):
    """One in four probabilities is zero, and the others are a third larger: with values of one, the mean stays."""
    layout = Layout((64, 64))
    q, k = (torch.randn(128, 4, 8, device=device) for _ in range(2))
    v = torch.ones(128, 4, 8, device=device)
    for options in ({}, {"softcap": 5.0}):
        out = varlen_attention(q, k, v, layout.segments(device), dropout=0.25, **options)
        assert 0.97 < out.mean().item() < 1.03
        assert out.std().item() > 0.05
        # The first query sees one key: it is there with a third more, or it is not.
        first = {round(value, 4) for value in out[0, :, 0].tolist() + out[64, :, 0].tolist()}
        assert first <= {0.0, 1.3333}


def test_under_autocast_as_pytorch_casts(device):
    given = tensors(PLAIN, device, size=16)
    with torch.autocast(device.type, torch.bfloat16):
        out = varlen_attention(*given, PLAIN.segments(device))
        expected = torch.nn.functional.scaled_dot_product_attention(*(t[None] for t in given[:1] * 3))
    assert out.dtype == expected.dtype == torch.bfloat16
    lower = varlen_attention(*(t.bfloat16() for t in given), PLAIN.segments(device))
    assert torch.equal(out, lower)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(upstream([out]), given))


@pytest.mark.parametrize("options", ["causal", "window 3", "softcap"])
def test_nothing_waits_for_the_device(options, device):
    given = tensors(SHARED, device)
    segments = SHARED.segments(device)
    with Waits() as waits:
        out = varlen_attention(*given, segments, **OPTIONS[options])
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert waits.found == []


def test_torch_compile_calls_it_whatever_the_lengths(device):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    @torch.compile(backend="eager")
    def layer(q, k, v, segments):
        return 2 * varlen_attention(2 * q, k, v, segments)

    for layout in LAYOUTS.values():
        q, k, v = (t.detach() for t in tensors(layout, device))
        found = layer(q, k, v, layout.segments(device))
        assert torch.equal(found, 2 * varlen_attention(2 * q, k, v, layout.segments(device)))
    # What is around it is compiled for one length, and once more for all.
    assert counters["stats"]["unique_graphs"] <= 6


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(4, 4, 8)}, ValueError, r"q must have shape \[16, Hq, D\].* got \[4, 4, 8\]"),
        ({"k": torch.zeros(16, 3, 8)}, ValueError, r"k must have shape \[16, Hk, 8\] with Hk a divisor of 4"),
        ({"k": torch.zeros(16, 2, 4)}, ValueError, r"k must have shape"),
        ({"v": torch.zeros(16, 4, 8)}, ValueError, r"v must have shape \[16, 2, Dv\]; got \[16, 4, 8\]"),
        ({"v": torch.zeros(16, 2, 8).half()}, ValueError, "q, k and v must have one dtype"),
        ({"q": torch.zeros(16, 4, 8).int()}, TypeError, "q must be float32, bfloat16, float16 or float64"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks must have shape \[4\].* got \[2\]"),
        ({"window": 0}, ValueError, "window must be None or a positive int; got 0"),
        ({"window": 2.0}, ValueError, "window must be None or a positive int; got 2.0"),
        ({"softcap": 0.0}, ValueError, "softcap must be None or a positive number; got 0.0"),
        ({"scale": math.inf}, ValueError, "scale must be None or a finite number; got inf"),
        ({"dropout": 1.0}, ValueError, r"dropout must lie in \[0, 1\); got 1.0"),
        ({"backend": "cudnn"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_bad_arguments(changes, error, message):
    q, k, v = (t.detach() for t in tensors(PLAIN, "cpu"))
    given = {"q": q, "k": k, "v": v, **changes}
    with pytest.raises(error, match=message):
        varlen_attention(segments=PLAIN.segments("cpu"), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([],), "q_lengths must be one length of at least 1 for each segment"),
        (([3, 0],), r"q_lengths .* got \[3, 0\]"),
        (([3], "cpu", [2]), r"k_lengths must be .* none below its queries' \[3\]; got \[2\]"),
        (([3], "cpu", [3, 3]), "k_lengths must be a length for each segment"),
        (([3], "cpu", [3], Shared.make(np.arange(2), 3, "cpu")), "keys must name 3 rows, the sum of k_lengths; got 2"),
        (([3], "cpu", [3], Shared.make(np.arange(3), 4, "cpu")), "keys must name rows of the packed row"),
        (([3], "cpu", [3], Shared.make(np.array([-1, 0, 1]), 3, "cpu")), "keys must name rows of the packed row"),
    ],
)
def test_bad_segments(given, message):
    with pytest.raises(ValueError, match=message):
        Segments.make(*(given if len(given) > 1 else (*given, "cpu")))


def test_segments_are_made_of_host_lists():
    segments = SHARED.segments("cpu")
    assert segments.q_ends == (4, 6, 9, 10, 15, 17, 21)
    assert segments.k_ends == (4, 10, 19, 26, 35, 37, 43)
    assert segments.cu_k.tolist() == [0, *segments.k_ends]
    assert segments.cu_q.dtype == torch.int32
    assert (segments.longest_q, segments.longest_k) == (5, 9)
    assert PLAIN.segments("cpu").cu_k is not None


# ---------------------------------------------------------------------------------------------------------------------
# Flash attention on CUDA: its operators' arguments and meaning, on the CPU
# ---------------------------------------------------------------------------------------------------------------------


def of_segments(tensor, cumulative):
    return tensor.split(cumulative.diff().tolist())


def flash_probabilities(q, k, left, right, scale):
    """[H, Lq, Lk] and the log-sum-exp of the scores: aligned at the end, `left` keys before and `right` behind."""
    queries, keys = q.shape[0], k.shape[0]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    distance = torch.arange(keys) - (torch.arange(queries).unsqueeze(1) + keys - queries)
    seen = distance <= right if left < 0 else (distance <= right) & (distance >= -left)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
                  window_size_left=None, window_size_right=None, **others):  # fmt: skip
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert is_causal == (window_size_left == -1)
    assert window_size_right == 0
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    assert q.dtype in (torch.bfloat16, torch.float16)
    outs, lses = [], []
    for a, b, c in zip(of_segments(q, cu_q), of_segments(k, cu_k), of_segments(v, cu_k), strict=True):
        p, lse = flash_probabilities(a, b, window_size_left, window_size_right, scale)
        c = c.repeat_interleave(a.shape[1] // c.shape[1], 1)
        outs.append(torch.einsum("hqk,khd->qhd", p, c.float()).to(q.dtype))
        lses.append(lse)
    empty = torch.empty(0)
    return torch.cat(outs), torch.cat(lses, 1), empty, empty, empty


def flash_backward(dy, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
                   scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
    """From o and the log-sum-exp that it is given, as the kernels compute it."""
    assert dy.stride(-1) == 1
    grads = [[], [], []]
    parts = (of_segments(t, cu_q) for t in (dy, q, out))
    for g, a, o, b, c, s in zip(*parts, of_segments(k, cu_k), of_segments(v, cu_k), lse.split(cu_q.diff().tolist(), 1),
                                strict=True):  # fmt: skip
        group = a.shape[1] // b.shape[1]
        p, plain = flash_probabilities(a, b, window_size_left, window_size_right, scale)
        p = p * (plain - s).exp().unsqueeze(-1)
        wide = c.repeat_interleave(group, 1).float()
        dp = torch.einsum("qhd,khd->hqk", g.float(), wide)
        ds = p * (dp - (g.float() * o.float()).sum(-1).t().unsqueeze(-1)) * scale
        grads[0].append(torch.einsum("hqk,khd->qhd", ds, b.repeat_interleave(group, 1).float()))
        for into, left, right in ((grads[1], ds, a), (grads[2], p, g)):
            wide = torch.einsum("hqk,qhd->khd", left, right.float())
            into.append(wide.view(wide.shape[0], -1, group, wide.shape[-1]).sum(2))
    return tuple(torch.cat(part).to(q.dtype) for part in grads)


@pytest.fixture
def flash(monkeypatch) -> Iterator[list[str]]:
    """PyTorch's operators of flash attention take CPU tensors, and the op takes those for CUDA's."""
    called: list[str] = []

    def noted(name, function):
        def call(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return call

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", noted("forward", flash_forward))
    library.impl("_flash_attention_backward", noted("backward", flash_backward))
    monkeypatch.setattr(_segment_kernels, "of_chip", lambda device: (None, 256))
    yield called
    library._destroy()


@pytest.fixture
def cpu() -> torch.device:
    """Stand-ins are for the CPU, wherever the other tests run."""
    return torch.device("cpu")


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("options", ["causal", "scale", "window 1", "window 3", "a window wider than all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attention(layout, options, sinks, flash, cpu):
    layout = LAYOUTS[layout]
    check(layout, tensors(layout, cpu, torch.bfloat16, size=16, sinks=sinks), **OPTIONS[options])
    assert flash == ["forward", "backward"]


@pytest.mark.parametrize("heads", HEADS)
def test_heads_of_flash_attention(heads, flash, cpu):
    check(SHARED, tensors(SHARED, cpu, torch.float16, HEADS[heads], sinks=True), window=4)
    assert flash == ["forward", "backward"]


def test_flash_attention_wants_heads_in_one_piece(flash, cpu):
    strided = [torch.randn(PLAIN.n, heads, 16, 2).bfloat16()[..., 0].requires_grad_() for heads in (4, 2, 2)]
    out = varlen_attention(*strided, PLAIN.segments(cpu))
    # A gradient that is one number everywhere has no strides at all.
    grads = torch.autograd.grad(out.sum(), strided)
    assert flash == ["forward", "backward"]
    assert all(g.shape == t.shape for g, t in zip(grads, strided, strict=True))


def test_a_second_derivative_of_flash_attention_raises(flash, cpu):
    given = tensors(PLAIN, cpu, torch.bfloat16)
    found = torch.autograd.grad(upstream([varlen_attention(*given, PLAIN.segments(cpu))]), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (sum(g.float().square().sum() for g in found) + given[0].float().sum()).backward()


def test_flash_attention_does_not_wait_for_the_device(flash, cpu):
    given = tensors(SHARED, cpu, torch.bfloat16, sinks=True)
    segments = SHARED.segments(cpu)
    q, k, v, sinks = given
    with Waits() as waits:
        out = varlen_attention(q, k, v, segments, sinks=sinks)
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert waits.found == []
    assert flash == ["forward", "backward"]


FORWARD = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None)"
    " -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
)
BACKWARD = (
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)"
)


@pytest.mark.parametrize(("name", "relied_on"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_the_operators_have_the_arguments_that_are_relied_on(name, relied_on):
    schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
    assert schema.is_backward_compatible_with(torch._C.parse_schema(relied_on)), schema


@pytest.mark.skipif(find_spec("torch.nn.attention.varlen") is None, reason="this torch has no varlen_attn")
def test_pytorchs_own_varlen_attention_calls_them_alike(flash, cpu):
    """What `varlen_attn` gives them for a window and a scale means the same."""
    varlen = import_module("torch.nn.attention.varlen")
    given = [t.detach() for t in tensors(SHARED, cpu, torch.bfloat16, size=16)]
    segments = SHARED.segments(cpu)
    k, v = (ops.take(t, segments.keys) for t in given[1:])
    takes = inspect.signature(varlen.varlen_attn).parameters
    for window, theirs in ((None, (-1, 0)), (3, (2, 0))):
        options = {"scale": 0.3, "window_size": theirs, "enable_gqa": True}
        expected = varlen.varlen_attn(
            given[0], k, v, segments.cu_q, segments.cu_k, segments.longest_q, segments.longest_k,
            **{name: value for name, value in options.items() if name in takes},
        )  # fmt: skip
        assert torch.equal(varlen_attention(*given, segments, scale=0.3, window=window), expected)


# ---------------------------------------------------------------------------------------------------------------------
# An installed flash attention
# ---------------------------------------------------------------------------------------------------------------------


def fa2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None):  # fmt: skip
    """flash_attn 2.8's parameters and their meaning, for tensors on the CPU."""
    assert causal
    assert (alibi_slopes, block_table, dropout_p) == (None, None, 0.0)
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max())
    left = window_size[0]
    outs = []
    for a, b, c in zip(of_segments(q, cu_seqlens_q), of_segments(k, cu_seqlens_k), of_segments(v, cu_seqlens_k),
                       strict=True):  # fmt: skip
        group = a.shape[1] // b.shape[1]
        b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        distance = torch.arange(len(b)) - (torch.arange(len(a)).unsqueeze(1) + len(b) - len(a))
        seen = (distance <= 0) & ((distance >= -left) if left >= 0 else True)
        scores = torch.einsum("qhd,khd->hqk", a, b).float() * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", p.to(c.dtype), c))
    return torch.cat(outs)


def fa3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False):  # fmt: skip
    """flash_attn_interface's, which has no dropout, and of which some versions return the log-sum-exp as well."""
    assert (seqused_q, seqused_k, qv) == (None, None, None)
    out = fa2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
              window_size, softcap)  # fmt: skip
    return out, torch.zeros(q.shape[1], q.shape[0])


def fa4(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0):  # fmt: skip
    """flash_attn.cute's, which finds the greatest lengths out by itself."""
    left, right = (-1 if size is None else size for size in window_size)
    return fa2(q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max(), 0.0,
               softmax_scale, causal, (left, right), softcap)  # fmt: skip


@pytest.fixture
def package(monkeypatch):
    """Puts a function where `flash_attn` would have it."""

    def install(function):
        monkeypatch.setattr(_segment_kernels, "_found", lambda: function)

    return install


@pytest.fixture
def loaded(monkeypatch):
    """Puts a function where transformers keeps the one that a model has asked for."""
    utils = import_module("transformers.modeling_flash_attention_utils")

    def load(function):
        monkeypatch.setattr(utils, "_flash_varlen_fn", function, raising=False)

    return load


@pytest.mark.parametrize("function", [fa2, fa3, fa4], ids=lambda function: function.__name__)
@pytest.mark.parametrize("options", ["softcap", "softcap and window"])
def test_a_soft_cap_by_an_installed_package(options, function, package, flash, cpu):
    package(function)
    check(SHARED, tensors(SHARED, cpu, torch.bfloat16, size=16), **OPTIONS[options])
    assert flash == []


@pytest.mark.parametrize("function", [fa2, fa3, fa4], ids=lambda function: function.__name__)
@pytest.mark.parametrize("options", ["causal", "window 3", "softcap and window"])
def test_what_a_model_has_asked_for_serves_it(options, function, loaded, flash, cpu):
    loaded(function)
    check(SHARED, tensors(SHARED, cpu, torch.bfloat16, size=16), **OPTIONS[options])
    assert flash == []


@pytest.mark.parametrize("lacks", ["no scale", "no softcap"])
def test_what_they_do_not_take_goes_on(lacks, loaded, package, flash, cpu, monkeypatch):
    """Sinks and dropout to PyTorch's, a soft cap that nobody has to the formula."""

    def refuses(*given, **options):
        raise AssertionError("it was called")

    takes = {"no scale": lambda q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softcap, window_size: None,
             "no softcap": lambda q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale: None}  # fmt: skip
    refuses.__signature__ = inspect.signature(takes[lacks])
    loaded(refuses)
    package(refuses)
    q, k, v, sinks = (t.detach() for t in tensors(SHARED, cpu, torch.bfloat16, size=16, sinks=True))
    segments = SHARED.segments(cpu)
    varlen_attention(q, k, v, segments, sinks=sinks)
    varlen_attention(q, k, v, segments, window=2)
    assert flash == ["forward"] * 2
    varlen_attention(q, k, v, segments, softcap=2.0, window=2)
    varlen_attention(q, k, v, segments, softcap=2.0, sinks=sinks)
    loaded(None)
    varlen_attention(q.float(), k.float(), v.float(), segments)
    varlen_attention(q[..., :9].contiguous(), k[..., :9].contiguous(), v, segments)
    varlen_attention(q[..., :12], k[..., :12], v[..., :12], segments)
    assert flash == ["forward"] * 2
    # A flash attention that the user has put in the place of PyTorch's has no dropout.
    monkeypatch.setattr(_segment_kernels, "_is_replaced", lambda: True)
    varlen_attention(q, k, v, segments, dropout=0.5)
    assert flash == ["forward"] * 2


def test_which_chips_have_flash_attention(monkeypatch):
    of_chip = _segment_kernels.of_chip.__wrapped__
    assert "not cpu's" in of_chip(torch.device("cpu"))[0]
    built, capability = True, (9, 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    widest = {(8, 0): 256, (9, 0): 256, (10, 0): 256, (8, 6): 192, (8, 9): 192, (12, 0): 192, (12, 1): 192}
    for capability, expected in widest.items():  # noqa: B007  read by the lambda
        assert of_chip(torch.device("cuda", 0)) == (None, expected)
    capability = 7, 5
    assert "needs compute capability 8.0; this chip has 7.5" in of_chip(torch.device("cuda", 0))[0]
    built = False
    assert "no flash attention" in of_chip(torch.device("cuda", 0))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def a_segment_sees_its_neighbour(monkeypatch):
    original = op._one_by_one

    def joined(q, k, v, sinks, segments, options, by_formula):
        return original(q, k, v, sinks, Segments.make([len(q)], q.device, [len(k)]), options, by_formula)

    monkeypatch.setattr(op, "_one_by_one", joined)


def aligned_at_the_beginning(monkeypatch):
    original = op._seen
    monkeypatch.setattr(op, "_seen", lambda queries, keys, window, device: original(queries, keys, window, device)
                        if queries == keys else torch.ones(queries, keys, dtype=torch.bool).tril())  # fmt: skip


def without_the_window(monkeypatch):
    original = op._seen
    monkeypatch.setattr(op, "_seen", lambda queries, keys, window, device: original(queries, keys, None, device))
    by_pytorch = op._by_pytorch
    monkeypatch.setattr(
        op, "_by_pytorch", lambda q, k, v, options: by_pytorch(q, k, v, op.replace(options, window=None))
    )


def a_window_one_too_wide(monkeypatch):
    original = op._seen
    monkeypatch.setattr(
        op, "_seen", lambda queries, keys, window, device: original(queries, keys, window and window + 1, device)
    )


def without_the_softcap(monkeypatch):
    original = op._by_formula
    monkeypatch.setattr(op, "_by_formula", lambda *given: original(*given[:-1], op.replace(given[-1], softcap=None)))


PLANTED = {
    a_segment_sees_its_neighbour: (PLAIN, {}),
    aligned_at_the_beginning: (SHARED, {}),
    without_the_window: (PLAIN, {"window": 3}),
    a_window_one_too_wide: (PLAIN, {"window": 3}),
    without_the_softcap: (PLAIN, {"softcap": 1.5}),
}


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, device, monkeypatch):
    layout, options = PLANTED[fault]
    given = tensors(layout, device)
    check(layout, given, **options)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="result 0"):
        check(layout, given, **options)


def test_a_shared_gradient_that_is_counted_once_is_seen(device, monkeypatch):
    monkeypatch.setattr(Shared, "gradient", lambda self, dy: self._once.of(dy))
    with pytest.raises(AssertionError, match="result 2"):
        check(SHARED, tensors(SHARED, device))


def test_sinks_that_are_ignored_are_seen(flash, cpu, monkeypatch):
    forward = _segment_kernels._flash_forward
    monkeypatch.setitem(
        _segment_kernels._KERNELS, "flash",
        (lambda q, k, v, sinks, *rest: forward(q, k, v, None, *rest), _segment_kernels._flash_backward),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="result 0"):
        check(SHARED, tensors(SHARED, cpu, torch.bfloat16, size=16, sinks=True))
