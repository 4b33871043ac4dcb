"""Attention inside segments: values and gradients against a masked softmax over the whole packed row."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from npu_trainer_kernels import ops
from npu_trainer_kernels.ops import Segments, Shared, varlen_attention
from tests.closeness import assert_op_close
from tests.conftest import DEVICE
from tests.ops.test_shared_rows import Waits

# The package's name for it is the function.
op = import_module("npu_trainer_kernels.ops.attention.varlen_attention")
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
SEVERAL = (16, 8)
HEADS = {"each its own": (8, 8), "groups": (12, 4), "one for all": (6, 1)}


def masked_softmax(q, k, v, layout, *, scale=None, window=None, softcap=None, sinks=None):
    """Every query against every row, with the rows that it does not see masked: no segments, no taking of rows."""
    exact = torch.promote_types(q.dtype, torch.float32)
    n, heads, size = q.shape
    seen = seen_of(layout, window)
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


def by_pytorch(q, k, v, layout, *, scale=None, window=None):
    """The same by PyTorch's attention with a mask, as a model calls it."""
    seen = seen_of(layout, window).to(q.device)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    rows = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*rows, seen, scale=scale)[0].transpose(0, 1)


def seen_of(layout, window):
    """`[n, n]`, which rows of the packed row each query sees."""
    seen = torch.zeros(layout.n, layout.n, dtype=torch.bool)
    start = 0
    for i, length in enumerate(layout.queries):
        rows = range(start, start + length) if layout.keys is None else layout.keys[i]
        for j in range(length):
            last = len(rows) - length + j
            first = 0 if window is None else max(0, last - window + 1)
            seen[start + j, list(rows[first : last + 1])] = True
        start += length
    return seen


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
        if q.device.type != "cpu" and q.dtype == torch.float32 and sinks is None and options.get("softcap") is None:
            # PyTorch's kernels for accelerators, which an unpatched model and the torch backend have, are no formula of
            # correctly rounded operators: their exponentials are approximations.
            return by_pytorch(
                q, k, v, layout, **{name: options[name] for name in ("scale", "window") if name in options}
            )
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
    check(layout, tensors(layout, device, heads=SEVERAL, sinks=sinks), **OPTIONS[options])


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
    check(SHARED, tensors(SHARED, device, heads=SEVERAL, size=size, values=values, sinks=sinks))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_gradient_of_a_sink_is_rounded_once(dtype, device):
    """And summed in fp32 until then, over all segments: as it is where the sinks themselves are in fp32."""
    *given, sinks = (t.detach() for t in tensors(SHARED, device, dtype, heads=SEVERAL, sinks=True))

    def gradient(sinks):
        out = varlen_attention(*given, SHARED.segments(device), sinks=sinks.requires_grad_())
        return torch.autograd.grad(upstream([out]), sinks)[0]

    assert torch.equal(gradient(sinks), gradient(sinks.float()).to(dtype))


def test_fp64(device):
    given = [t.double().detach().requires_grad_() for t in tensors(SHARED, device, sinks=True)]
    for options in OPTIONS.values():
        q, k, v, sinks = given
        ours = varlen_attention(q, k, v, SHARED.segments(device), sinks=sinks, **options)
        torch.testing.assert_close(ours, masked_softmax(q, k, v, SHARED, sinks=sinks, **options))


def test_of_one_key_the_value_is_all(device):
    given = [((4 * t.detach()).round() / 4).requires_grad_() for t in tensors(PLAIN, device)]  # exact in any order
    q, k, v = given
    out = varlen_attention(q, k, v, PLAIN.segments(device), window=1)
    # A GPU divides what it has added up by its sum, which is one exponential here.
    rounding = 0 if device.type == "cpu" else 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out, v.repeat_interleave(2, 1), rtol=rounding, atol=0)
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
    check(layout, given)
    check(layout, [t.requires_grad_() for t in given], softcap=2.0)


def test_the_package_reference(device):
    given = tensors(SHARED, device, sinks=True)
    q, k, v, sinks = given
    for options in OPTIONS.values():
        found = ops.varlen_attention_reference(q, k, v, SHARED.segments(device), sinks=sinks, **options)
        torch.testing.assert_close(found, masked_softmax(q, k, v, SHARED, sinks=sinks, **options))


@pytest.fixture
def repeatable(device) -> Iterator[None]:
    """On an accelerator the gradient of q repeats under deterministic algorithms alone, as PyTorch's own does."""
    torch.use_deterministic_algorithms(device.type != "cpu", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ["causal", "window 3", "softcap"])
def test_the_same_bits_every_time(options, dtype, device):
    given = tensors(SHARED, device, dtype, size=16, sinks=options == "causal")
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


# There Dynamo looks for the reason why it compiles anew among arguments of another call, and does not find them all.
@pytest.mark.xfail(torch.__version__.startswith("2.11."), raises=AttributeError, reason="fails in torch 2.11")
def test_torch_compile_calls_it_whatever_the_lengths(device):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    @torch.compile(backend="eager")
    def layer(q, k, v, segments):
        return 2 * varlen_attention(2 * q, k, v, segments)

    def same(layouts):
        for layout in layouts:
            q, k, v = (t.detach() for t in tensors(layout, device))
            found = layer(q, k, v, layout.segments(device))
            assert torch.equal(found, 2 * varlen_attention(2 * q, k, v, layout.segments(device)))
        return counters["stats"]["unique_graphs"]

    # What is around it is compiled for a first length, and again for any.
    compiled = same(LAYOUTS.values())
    assert same([Layout((4, 9)), Layout((30,)), tree(None, 0, 1, lengths=(2, 2, 7))]) == compiled


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
        ({"segments": None}, TypeError, "segments must be Segments; got NoneType"),
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
    given = {"q": q, "k": k, "v": v, "segments": PLAIN.segments("cpu"), **changes}
    with pytest.raises(error, match=message):
        varlen_attention(**given)


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
                        if queries == keys
                        else torch.ones(queries, keys, dtype=torch.bool, device=device).tril())  # fmt: skip


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


# ---------------------------------------------------------------------------------------------------------------------
# The trial on a device
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def untried():
    op.trial.cache_clear()
    yield
    op.trial.cache_clear()


def tried(dtype=torch.bfloat16, window=False, softcap=None, sinks=False):
    return op.trial(torch.device(DEVICE), dtype, (16, 16), window, softcap, sinks, None)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_trial_finds_nothing_where_nothing_is_wrong(untried, dtype, window, softcap, sinks):
    assert tried(dtype, window, softcap, sinks) is None


def whole_row(own, *args):
    q, k, v, sinks, _, options, backend = args
    one = Segments.make([q.shape[0]], q.device, [k.shape[0]])
    return own(q, k, v, sinks, one, options, backend)


def without_window(own, *args):
    return own(*args[:5], dataclasses.replace(args[5], window=None), args[6])


def half_a_gradient(own, *args):
    out = own(*args)
    return out / 2 + out.detach() / 2


def raises(own, *args):
    raise RuntimeError("no such operator\nand more")


@pytest.mark.parametrize("fault", [whole_row, without_window, half_a_gradient, raises])
def test_a_trial_finds_what_is_wrong(untried, monkeypatch, fault):
    monkeypatch.setattr(op, "_attend", functools.partial(fault, op._attend))
    reason = tried(window=True)
    assert reason is not None
    assert ("RuntimeError: no such operator" in reason) == (fault is raises)
    assert "\n" not in reason


def test_a_trial_inside_of_a_checkpoint_leaves_no_trace(untried):
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)

    def layer(x):
        assert tried(torch.float32) is None
        return torch.tanh(x @ x)

    state = torch.get_rng_state()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    expected = torch.autograd.grad(torch.tanh(x @ x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
