"""gated_delta_rule against its reference and transformers: gates, segments, states, what is kept, fla's calls."""

import inspect
import math
import sys
from functools import wraps
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from npu_trainer_kernels import backends
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.ops import Segments, gated_delta_rule, gated_delta_rule_reference
from npu_trainer_kernels.ops.launch import KernelError
from npu_trainer_kernels.ops.linear_attention import DeltaRuleForm, fla, grid, unserved_by_fla
from npu_trainer_kernels.ops.linear_attention import delta_rule_chunks as chunks
from npu_trainer_kernels.ops.linear_attention import delta_rule_kernels as kernels
from npu_trainer_kernels.ops.linear_attention import head_slices as slices
from npu_trainer_kernels.ops.trial import differs
from tests.closeness import assert_op_close
from tests.ops.test_shared_rows import Waits
from tests.pairs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Chunks have 16, 32 or 64 tokens: one token, a chunk less one, a chunk, one more, an odd number of chunks.
ROWS = {"a token": (2, 1), "63": (1, 63), "64": (2, 64), "65": (3, 65), "200": (1, 200)}
SEGMENTS = {"segments": (1, 5, 64, 130, 3), "short segments": (2, 1, 3, 1, 1, 2), "one segment": (70,)}
GATES = {
    "usual": lambda g: -g.exp() * 0.3,
    "weak": lambda g: -g.exp() * 0.01,
    "strong": lambda g: torch.full_like(g, -50),
    "none": torch.zeros_like,
    "mixed": lambda g: torch.where(g > 0, -50, -0.01),
    "forgets": lambda g: torch.where(g > 1, -torch.inf, -0.1),
}
# Key heads, value heads, Dk, Dv.
HEADS = [(2, 6, 12, 10), (3, 3, 8, 16), (1, 2, 16, 16)]


def segments_of(where, device):
    return Segments.make(SEGMENTS[where], device) if where in SEGMENTS else None


def make(device, dtype=torch.float32, where="segments", gate="usual", channel=False, delta=True, state=True,
         heads=HEADS[0]):  # fmt: skip
    """q, k, v, g, beta and state; keys of length 1, as models have them."""
    batch, length = ROWS.get(where) or (1, sum(SEGMENTS[where]))
    key_heads, value_heads, key, value = heads

    def drawn(*shape):
        return torch.randn(batch, length, *shape, device=device)

    k = drawn(key_heads, key)
    given = [
        drawn(key_heads, key).to(dtype),
        (k / k.norm(dim=-1, keepdim=True)).to(dtype),
        drawn(value_heads, value).to(dtype),
        GATES[gate](drawn(value_heads, *[key] * channel)),
        drawn(value_heads).sigmoid().to(dtype) if delta else None,
        torch.randn(len(SEGMENTS.get(where, "")) or batch, value_heads, key, value, device=device) if state else None,
    ]
    return [None if t is None else t.requires_grad_() for t in given]


def upstream(outputs):
    """A loss whose gradient differs from number to number."""
    total = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        if y is not None and y.requires_grad:
            g = torch.linspace(-1, 1.5, y.numel(), device=y.device).view(y.shape)
            total = total + (y * g.to(y.dtype)).sum(dtype=torch.float64).cpu()
    return total


def calls(backend="torch", **options):
    def ours(q, k, v, g, beta=None, state=None):
        return gated_delta_rule(q, k, v, g, beta, state=state, backend=backend, **options)

    def reference(q, k, v, g, beta=None, state=None):
        return gated_delta_rule_reference(q, k, v, g, beta, state=state, **options)

    return ours, reference


def check(given, backend, **options):
    assert_op_close(*calls(backend, **options), given, upstream)


def outcome(given, backend, **options):
    """o, the states after rows, and all gradients."""
    results = calls(backend, return_state=True, **options)[0](*given)
    wanted = [t for t in given if t is not None]
    return [*results, *torch.autograd.grad(upstream(results), wanted)]


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "dtype", "gate", "channel", "delta", "state", "normalize", "heads"),
    pairs([*ROWS, *SEGMENTS], DTYPES, [*GATES], [False, True], [True, False], [True, False], [False, True], HEADS),
    ids=str,
)
def test_matches_reference(device, backend, where, dtype, gate, channel, delta, state, normalize, heads):
    given = make(device, dtype, where, gate, channel, delta, state, heads)
    check(given, backend, segments=segments_of(where, device), normalize=normalize)
    check(given, backend, segments=segments_of(where, device), normalize=normalize, return_state=True, scale=0.7)


@pytest.mark.parametrize("channel", [False, True])
def test_equal_keys_that_are_overwritten(device, backend, channel):
    """Where the powers of a chunk's matrix grow beyond any bound, and its inverse has a 1 and a -1 in each row."""
    q, k, v, g, beta, _ = make(device, where="200", gate="none", channel=channel)
    given = [q, torch.ones_like(k) / math.sqrt(k.shape[-1]), v, g, torch.ones_like(beta)]
    check([t.detach().requires_grad_() for t in given], backend)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("where", ["200", "segments"])
def test_a_loss_of_the_state_alone(device, backend, where, delta, channel):
    # With a stronger gate nothing is left of what is 200 tokens before.
    q, *others = make(device, where=where, gate="weak", channel=channel, delta=delta)
    given = [q.detach(), *others]  # its gradient is zero

    def last(op):
        return lambda *tensors: op(*tensors)[1]

    ours, reference = calls(backend, segments=segments_of(where, device), return_state=True)
    assert_op_close(last(ours), last(reference), given, upstream)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("cut", [1, 64, 100])
def test_two_parts_with_the_state_between_them_are_the_whole(device, backend, cut, channel):
    given = make(device, where="200", channel=channel)

    def in_parts(q, k, v, g, beta, state):
        parts = [(t[:, :cut], t[:, cut:]) for t in (q, k, v, g, beta)]
        before = [a for a, _ in parts]
        first, state = gated_delta_rule(*before, state=state, return_state=True, backend=backend)
        return torch.cat((first, gated_delta_rule(*(b for _, b in parts), state=state, backend=backend)), 1)

    assert_op_close(in_parts, calls(backend)[1], given, upstream)


@pytest.mark.parametrize("of_v", DTYPES, ids=str)
def test_dtypes_that_differ(device, backend, of_v):
    q, k, v, g, beta, state = make(device, torch.bfloat16)
    given = [q, k.detach().half().requires_grad_(), v.detach().to(of_v).requires_grad_(),
             g.detach().bfloat16().requires_grad_(), beta.detach().float().requires_grad_(), state]  # fmt: skip
    check(given, backend, segments=segments_of("segments", device), normalize=True)
    assert calls(backend, segments=segments_of("segments", device))[0](*given).dtype == of_v


def test_autocast_changes_no_bit(device, backend):
    given = make(device, where="65")
    expected = outcome(given, backend)
    with torch.autocast(device.type, torch.bfloat16):
        results = calls(backend, return_state=True)[0](*given)
        loss = upstream(results)
        found = [*results, *torch.autograd.grad(loss, given)]
    assert all(map(torch.equal, found, expected))


# ---------------------------------------------------------------------------------------------------------------------
# transformers' own functions
# ---------------------------------------------------------------------------------------------------------------------


def agree(ours, theirs, given):
    results = []
    for function in (ours, theirs):
        outputs = function(*given)
        results.append([*outputs, *torch.autograd.grad(upstream(outputs), given)])
    assert differs("transformers' function", results[0], [t.double() for t in results[1]], torch.float32) is None


@pytest.mark.parametrize("where", ["65", "200"])
@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_agrees_with_qwen3_next(device, backend, name, where):
    function = inspect.unwrap(getattr(modeling_qwen3_next, name))

    def theirs(q, k, v, g, beta, state):
        # Some versions take no groups of value heads.
        q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
        return function(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    agree(calls(backend, normalize=True, return_state=True)[0], theirs, make(device, where=where))


@pytest.mark.parametrize("where", ["65", "200"])
@pytest.mark.parametrize("name", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
def test_agrees_with_kimi_linear(device, backend, name, where):
    function = inspect.unwrap(getattr(modeling_kimi_linear, name))

    def theirs(q, k, v, g, beta, state):
        return function(
            q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )  # fmt: skip

    given = make(device, where=where, channel=True, heads=HEADS[1])
    agree(calls(backend, normalize=True, return_state=True)[0], theirs, given)


@pytest.mark.parametrize("where", ["65", "200"])
def test_agrees_with_mamba2(device, backend, where):
    function = inspect.unwrap(modeling_bamba.mamba2_chunk_scan)
    c, b, x, _, _, state = make(device, where=where, delta=False)
    dt = torch.rand(*x.shape[:3], device=device, requires_grad=True)
    a = (-torch.rand(x.shape[2], device=device) - 0.1).requires_grad_()

    def theirs(c, b, x, dt, a, state):
        o, last = function(x, dt, a, b, c, 32, initial_states=state.transpose(2, 3), return_final_states=True)
        return o, last.transpose(2, 3)

    def ours(c, b, x, dt, a, state):
        x = dt.unsqueeze(-1) * x
        return gated_delta_rule(c, b, x, dt * a, scale=1.0, state=state, return_state=True, backend=backend)

    agree(ours, theirs, [c, b, x, dt, a, state])


# ---------------------------------------------------------------------------------------------------------------------
# Segments and rows
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("where", SEGMENTS)
def test_a_segment_is_as_alone(device, backend, where, delta, channel):
    given = make(device, where=where, channel=channel, delta=delta)
    lengths = SEGMENTS[where]

    def alone(*tensors):
        *tokens, state = tensors
        parts = zip(*((None,) * len(lengths) if t is None else t.split(lengths, 1) for t in tokens), strict=True)
        found = [calls(backend, return_state=True)[1](*part, s) for part, s in zip(parts, state.split(1), strict=True)]
        return torch.cat([o for o, _ in found], 1), torch.cat([last for _, last in found])

    assert_op_close(calls(backend, segments=segments_of(where, device), return_state=True)[0], alone, given, upstream)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("where", "bad"), [*(("segments", i) for i in range(5)), ("65", 0), ("65", 1), ("65", 2)])
def test_no_segment_sees_another(device, backend, where, bad, state, delta, channel):
    """NaN in one segment or row, its state and its gradients reaches no other one, forward or backward."""
    segments = segments_of(where, device)
    given = make(device, where=where, channel=channel, delta=delta, state=state)
    own = torch.zeros(given[2].shape[:2], dtype=torch.bool, device=device)
    if segments is None:
        own[bad] = True
    else:
        own[:, (0, *segments.q_ends)[bad] : segments.q_ends[bad]] = True
    rows = torch.arange(len(segments or own), device=device) == bad

    def run(given, do, dlast):
        results = calls(backend, segments=segments, return_state=True)[0](*given)
        wanted = [t for t in given if t is not None]
        return [*results, *torch.autograd.grad(results, wanted, [do, dlast])]

    do, dlast = (torch.randn_like(t) for t in calls(backend, segments=segments, return_state=True)[0](*given))
    expected = run(given, do, dlast)
    of_rows = [do.shape[:2] != t.shape[:2] for t in expected]
    spoiled = []
    for t in (*given, do, dlast):
        t = None if t is None else t.detach().clone()
        if t is not None:
            t[own if t.shape[:2] == own.shape else rows] = math.nan
            t.requires_grad_()
        spoiled.append(t)
    found = run(spoiled[:6], spoiled[6].detach(), spoiled[7].detach())
    for ours, clean, of_row in zip(found, expected, of_rows, strict=True):
        where_bad = rows if of_row else own
        assert ours[where_bad].isnan().all()
        assert torch.equal(ours[~where_bad], clean[~where_bad])


def states_that_leak(of_given, where=1):
    """The states between chunks, where the first chunk of one segment takes the state that the chunk before it leaves:
    in calls that are given states, or in calls that are given none."""
    own = chunks.states

    def states(u, read, written, decay, state, cut, backend):
        if cut.rows > where and (state is not None) == of_given:
            left = own(u, read, written, decay, state, cut, backend)[2]
            begin = torch.zeros_like(left) if state is None else state
            state = torch.cat((begin[:, :, :where], left[:, :, where - 1 : where], begin[:, :, where + 1 :]), 2)
        return own(u, read, written, decay, state, cut, backend)

    return states


@pytest.mark.parametrize(
    ("where", "row", "state", "delta", "channel"),
    pairs(["short segments", "segments"], [1, 2, 4], [True, False], [True, False], [False, True]),
    ids=str,
)
def test_a_leak_of_one_chunk_is_seen(device, backend, monkeypatch, where, row, state, delta, channel):
    given = make(device, where=where, gate="weak", channel=channel, delta=delta, state=state)
    monkeypatch.setattr(chunks, "states", states_that_leak(state, row))
    with pytest.raises(AssertionError):
        check(given, backend, segments=segments_of(where, device))


def test_one_index_for_all_layers(device, backend, monkeypatch):
    made = []
    uploaded = grid.uploaded
    monkeypatch.setattr(grid, "uploaded", lambda *a: made.append(a) or uploaded(*a))
    segments, given = segments_of("segments", device), make(device)
    numbers = []
    for _ in range(3):
        outcome(given, backend, segments=segments)
        numbers.append(len(made))
    assert 0 < numbers[0] == numbers[2]


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("where", ["65", "segments"])
def test_nothing_waits_for_the_device(device, backend, where, channel):
    segments, given = segments_of(where, device), make(device, where=where, channel=channel)
    with Waits() as waits:
        o, last = calls(backend, segments=segments, return_state=True)[0](*given)
        torch.autograd.grad([o, last], given, [torch.ones_like(o), torch.ones_like(last)])
    assert waits.found == []


def test_short_segments_have_short_chunks(device):
    def length(*lengths):
        v = torch.zeros(1, sum(lengths), 2, 128, device=device)
        numbers = slices._Slices(v, v, v[..., 0], v[..., 0], Segments.make(lengths, device), 1.0, False, "torch")
        return numbers.grid.length

    assert [length(*[5] * 8), length(*[30] * 8), length(1000, 5)] == [16, 32, 64]


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, slices, layouts, repetition
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["65", "segments"])
def test_only_inputs_are_kept(device, backend, where):
    given, kept = make(device, torch.bfloat16, where), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        calls(backend, segments=segments_of(where, device), return_state=True)[0](*given)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in given]


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("where", ["65", "segments"])
@pytest.mark.parametrize("number", [2, 3])
def test_slices_of_heads_are_the_whole(device, backend, monkeypatch, where, number, channel):
    """Slices of 2 + 1 and 1 + 1 + 1 key heads."""
    given = make(device, where=where, channel=channel, heads=(3, 6, 12, 10))
    options = {"segments": segments_of(where, device)}
    made, init = [], slices._Slices.__init__

    def cut(self, *args):
        init(self, *args)
        self.number = number
        made.append([keys.stop - keys.start for keys, _ in self])

    expected = outcome(given, backend, **options)
    monkeypatch.setattr(slices._Slices, "__init__", cut)
    found = outcome(given, backend, **options)
    assert made == [[1, 2] if number == 2 else [1, 1, 1]]
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole)


def test_a_slice_fits_its_bytes(device):
    """Two slices for a layer of 4,096 tokens, one on a card of 80 GiB, and never less than a key head."""
    with torch.device("meta"):

        def number(tokens, channel=False):
            q, v = torch.empty(1, tokens, 16, 128), torch.empty(1, tokens, 32, 128)
            g = torch.empty(1, tokens, 32, *[128] * channel)
            return slices._Slices(q, v, g, g, None, 1.0, False, "torch").number

        assert [number(1024), number(4096), number(4096, True), number(1 << 20)] == [1, 2, 4, 16]
        with devices.use_spec(CARD):
            assert [number(4096), number(4096, True), number(16384), number(1 << 20)] == [1, 1, 2, 16]


def operators(tokens):
    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    given = [torch.randn(1, tokens, 1, *size, requires_grad=True) for size in ((4,), (4,), (4,), (), ())]
    with Counter() as counter:
        calls()[0](*given).sum().backward()
    return counter.count


def test_operators_grow_with_the_logarithm_of_the_length():
    counts = [operators(64 * n) for n in (4, 8, 16, 32, 64)]
    steps = {b - a for a, b in pairwise(counts)}
    assert len(steps) == 1
    assert 0 < steps.pop() < 100


LAYOUTS = {
    "heads before tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a wider projection": lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every other token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["64", "segments"])
def test_strides(device, backend, layout, where):
    """The same bits in every layout."""
    given = [LAYOUTS[layout](t.detach()) for t in make(device, where=where, channel=True)]
    options = {"segments": segments_of(where, device)}
    found = outcome([t.requires_grad_() for t in given], backend, **options)
    dense = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in given]
    expected = outcome(dense, backend, **options)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("learned", [(0,), (1,), (2,), (3,), (4,), (5,), (0, 3), (1, 2), ()], ids=str)
def test_frozen(device, backend, learned):
    given = [t.detach().requires_grad_(i in learned) for i, t in enumerate(make(device))]
    segments = segments_of("segments", device)
    check(given, backend, segments=segments, return_state=True)
    assert calls(backend, segments=segments)[0](*given).requires_grad == bool(learned)


def test_same_bits_twice(device, backend):
    given, segments = make(device, torch.bfloat16), segments_of("segments", device)
    assert all(map(torch.equal, outcome(given, backend, segments=segments), outcome(given, backend, segments=segments)))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
def test_nothing(device, shape):
    q, v = (torch.randn(*shape, 2, size, device=device, requires_grad=True) for size in (8, 4))
    g = torch.zeros(*shape, 2, device=device, requires_grad=True)
    state = torch.randn(shape[0], 2, 8, 4, device=device, requires_grad=True)
    o, last = gated_delta_rule(q, q, v, g, g, state=state, return_state=True)
    assert o.shape == v.shape
    *found, of_state = torch.autograd.grad(o.sum() + (2 * last).sum(), (q, v, g, state))
    assert not any(grad.any() for grad in found)
    assert torch.equal(last, state)
    assert torch.equal(of_state, torch.full_like(state, 2))


@pytest.mark.parametrize("delta", [False, True])
def test_a_kernel_that_fails_hands_over_to_torch(device, monkeypatch, delta):
    """In forward, or in backward alone."""
    monkeypatch.setenv("NPU_KERNELS_STRICT", "0")
    given, segments = make(device, delta=delta), segments_of("segments", device)
    launch = kernels.launch

    def run(failing):
        def failed(kernel, *args):
            if kernel in failing:
                raise KernelError("planted")
            launch(kernel, *args)

        monkeypatch.setattr(kernels, "launch", failed)
        backends.forget_failures()
        with pytest.warns(RuntimeWarning, match="gated_delta_rule: torch takes over .* planted"):
            check(given, "triton", segments=segments, return_state=True)
        assert backends.failures() == {"gated_delta_rule": "planted"}
        backends.forget_failures()

    run([kernels._forward_kernel])
    run([kernels._backward_kernel])


def test_checkpointed(device, backend):
    given = make(device, where="65")
    expected = outcome(given, backend)
    results = torch.utils.checkpoint.checkpoint(calls(backend, return_state=True)[0], *given, use_reentrant=False)
    found = [*results, *torch.autograd.grad(upstream(results), given)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("where", ["65", "segments"])
def test_torch_compile(device, where, full):
    """The op is called; in a graph that must not break it is traced."""
    given = make(device, where=where)
    options = {"segments": segments_of(where, device), "return_state": True}

    def model(op):
        def run(q, k, v, g, beta, state):
            o, last = op(torch.tanh(q), k, v, g, beta, state=state, **options)
            return o * 2, last

        return run

    compiled = torch.compile(model(gated_delta_rule), backend="aot_eager", fullgraph=full)
    assert_op_close(compiled, model(gated_delta_rule_reference), given, upstream)


def test_the_length_of_chunks_is_a_constant_of_a_graph(monkeypatch):
    """Without it torch 2.11 cannot trace the op: the length would depend on data."""
    segments = Segments.make([3, 70, 1, 40], "cpu")
    v = torch.zeros(1, 114, 4, 6, device="cpu")
    monkeypatch.setattr(grid, "once_for_segments", lambda segments, key, make: key[1])

    def length(v):
        return v + grid.Grid.of(v, segments, lambda length: 4 * length**2 + 6400)

    assert torch.equal(torch.compile(length, backend="aot_eager", fullgraph=True)(v), length(v))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------

ZEROS = {"q": (1, 7, 2, 4), "k": (1, 7, 2, 4), "v": (1, 7, 4, 3), "g": (1, 7, 4), "beta": (1, 7, 4)}
BAD = [
    ({"q": torch.zeros(1, 7, 2, 4).double()}, TypeError, "q must be float32, bfloat16 or float16; got torch.float64"),
    ({"g": None}, TypeError, "g must be a tensor; got NoneType"),
    ({"q": torch.zeros(7, 2, 4)}, ValueError, r"q must have shape \[B, L, Hk, Dk\]; got \[7, 2, 4\]"),
    ({"k": torch.zeros(1, 7, 2, 5)}, ValueError, r"k must have q's shape \[1, 7, 2, 4\]; got \[1, 7, 2, 5\]"),
    ({"v": torch.zeros(1, 7, 3, 3)}, ValueError, r"v must have shape \[1, 7, Hv, Dv\] .* of 2; got \[1, 7, 3, 3\]"),
    ({"g": torch.zeros(1, 7, 2)}, ValueError, r"g must have shape \[1, 7, 4\] or \[1, 7, 4, 4\]; got \[1, 7, 2\]"),
    ({"beta": torch.zeros(1, 7, 2)}, ValueError, r"beta must have shape \[1, 7, 4\]; got \[1, 7, 2\]"),
    ({"scale": math.nan}, ValueError, "scale must be None or a finite number; got nan"),
    ({"state": torch.zeros(1, 4, 3, 4)}, ValueError, r"state must have shape \[1, 4, 4, 3\] .* got \[1, 4, 3, 4\]"),
    ({"state": torch.zeros(1, 4, 4, 3).half()}, ValueError, "state must .* be float32; got .* of torch.float16"),
    ({"segments": [3, 4]}, TypeError, "segments must be None or a Segments; got list"),
    ({"segments": Segments.make([3, 3], "cpu")}, ValueError, r"q must have shape \[1, 6, Hk, Dk\] .* \[1, 7, 2, 4\]"),
    ({"segments": Segments.make([4, 3], "cpu", [4, 7], None)}, ValueError, "segments must share no keys"),
    (
        {"segments": Segments.make([3, 4], "cpu"), "state": torch.zeros(1, 4, 4, 3)}, ValueError,
        r"state must have shape \[2, 4, 4, 3\]",
    ),
    ({"beta": torch.zeros(1, 7, 4, device="meta")}, ValueError, "all tensors must be on one device"),
    ({"backend": "cuda"}, ValueError, "'cuda'"),
    ({"backend": "fla"}, ValueError, "backend must be another one or None for this call; got 'fla': fla's kernels run"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_bad_input_names_argument_value_and_what_is_allowed(change, error, message):
    given = {**{name: torch.zeros(shape) for name, shape in ZEROS.items()}, **change}
    with pytest.raises(error, match=message):
        gated_delta_rule(**given)


# ---------------------------------------------------------------------------------------------------------------------
# flash-linear-attention: its functions by what fla-core 0.6.0 documents, on the CPU
# ---------------------------------------------------------------------------------------------------------------------

CARD = devices.DeviceSpec("cuda", "a card", 132, 256 << 10, 80 << 30)
NORMS = {"use_qk_l2norm_in_kernel": False}
# The parameters of the functions of fla-core 0.6.0 that are relied on, with their defaults.
FLA = {
    "gated_delta_rule.chunk_gated_delta_rule": (True, NORMS),
    "kda.chunk_kda": (True, NORMS),
    "simple_gla.chunk_simple_gla": (False, {}),
    "gla.chunk_gla": (False, {}),
}
FORMS = {name: DeltaRuleForm(name.endswith(("rule", "kda")), name.endswith(("kda", ".chunk_gla"))) for name in FLA}


def stand_in_for(name, found):
    """A function of fla, computed by our reference; it takes no argument that fla's has not."""

    def common(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, normalize):
        assert q.shape == k.shape
        assert q.dtype == k.dtype == v.dtype
        assert initial_state is None or initial_state.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        segments = None
        if cu_seqlens is not None:
            assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
            assert torch.equal(cu_seqlens, cu_seqlens_cpu)
            segments = Segments.make(cu_seqlens.diff().tolist(), "cpu")
        found.append(name)
        o, last = gated_delta_rule_reference(
            q, k, v, g, beta, scale=scale, normalize=normalize, segments=segments, state=initial_state,
            return_state=True,
        )  # fmt: skip
        return o, last if output_final_state else None

    if FLA[name][0]:

        def function(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                     use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None):  # fmt: skip
            assert g.shape[:3] == beta.shape == v.shape[:3]
            return common(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                          use_qk_l2norm_in_kernel)  # fmt: skip
    else:

        def function(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                     cu_seqlens_cpu=None):  # fmt: skip
            assert q.shape[:3] == v.shape[:3]
            return common(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                          False)  # fmt: skip

    return function


@pytest.fixture
def fla_calls(monkeypatch):
    """The calls of a stand-in for fla, on a CPU that is taken for a card."""
    if "cpu" not in str(torch.empty(0).device):
        pytest.skip("the stand-in is on the CPU")
    found = []
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    sys.modules["fla"].__spec__ = object()
    for name in FLA:
        module, function = name.split(".")
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", ModuleType(f"fla.ops.{module}"))
        setattr(sys.modules[f"fla.ops.{module}"], function, stand_in_for(name, found))
    fla._trial.cache_clear()
    with devices.use_spec(CARD):
        yield found
    fla._trial.cache_clear()


@pytest.mark.parametrize("name", FLA)
@pytest.mark.parametrize("where", ["65", "segments"])
@pytest.mark.parametrize("normalize", [False, True])
def test_fla_is_called_where_it_computes_the_same(fla_calls, name, where, normalize):
    form, cpu = FORMS[name], torch.device("cpu")
    normalize = normalize and form.delta
    given = make(cpu, torch.bfloat16, where, channel=form.by_channel, delta=form.delta)
    options = {"segments": segments_of(where, cpu), "normalize": normalize, "return_state": True, "scale": 0.3}

    def by_choice(q, k, v, g, beta=None, state=None):
        return gated_delta_rule(q, k, v, g, beta, state=state, **options)

    assert_op_close(by_choice, calls(**options)[1], given, upstream)
    tries = fla_calls.count(name)
    assert set(fla_calls) == {name}
    by_choice(*given)
    assert len(fla_calls) == tries + 1
    calls(**options)[0](*given)
    assert len(fla_calls) == tries + 1


@pytest.mark.parametrize("name", FLA)
def test_fla_is_left_alone_where_it_computes_something_else(fla_calls, monkeypatch, name):
    module, function = name.split(".")
    right, form = getattr(sys.modules[f"fla.ops.{module}"], function), FORMS[name]
    given = make(torch.device("cpu"), channel=form.by_channel, delta=form.delta)
    segments = segments_of("segments", torch.device("cpu"))
    expected = calls(segments=segments)[0](*given)

    @wraps(right)
    def wrong(*tensors, **options):
        o, last = right(*tensors, **options)
        return o, None if last is None else last.roll(1, 0)

    @wraps(right)
    def broken(*tensors, **options):
        raise LookupError("no such target")

    for planted, message in ((wrong, f"{function} gives other numbers there"), (broken, "LookupError: no such target")):
        fla._trial.cache_clear()
        monkeypatch.setattr(sys.modules[f"fla.ops.{module}"], function, planted)
        form = DeltaRuleForm(form.delta, form.by_channel, group=3, key=12, value=10)
        reason = unserved_by_fla(torch.device("cpu"), torch.float32, form)
        assert message in reason
        assert reason == unserved_by_fla(torch.device("cpu"), torch.float32, form)
        q, k, v, g, beta, state = given
        assert torch.equal(gated_delta_rule(q, k, v, g, beta, segments=segments, state=state), expected)
        with pytest.raises(ValueError, match="backend must be another one or None for this call; got 'fla'"):
            gated_delta_rule(q, k, v, g, beta, segments=segments, state=state, backend="fla")


def test_fla_runs_out_of_memory(fla_calls, monkeypatch):
    def full(*tensors, **options):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", full)
    with pytest.raises(torch.OutOfMemoryError):
        unserved_by_fla(torch.device("cpu"), torch.float32, FORMS["kda.chunk_kda"])


def test_when_fla_is_not_asked(fla_calls, monkeypatch):
    q, k, v, g, beta, _ = make(torch.device("cpu"), torch.bfloat16)
    gated_delta_rule(q, k, v.float(), g, beta)
    with pytest.raises(ValueError, match=r"fla takes q, k and v of one dtype; got torch.bfloat16, .* torch.float32"):
        gated_delta_rule(q, k, v.float(), g, beta, backend="fla")
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "torch,strict")
    gated_delta_rule(q, k, v, g, beta)
    monkeypatch.delenv("NPU_KERNELS_BACKEND")
    form = DeltaRuleForm(False, False, normalize=True)
    assert unserved_by_fla(torch.device("cpu"), q.dtype, form) == "fla has no norms of q and k without the delta rule"
    monkeypatch.delitem(sys.modules, "fla")
    assert unserved_by_fla(torch.device("cpu"), q.dtype, form) == "fla is not installed (the package fla-core)"
    with devices.use_spec(devices.DeviceSpec("cpu", "cpu", 1, 0)):
        assert unserved_by_fla(torch.device("cpu"), q.dtype, form) == "fla's kernels run on accelerators"
    assert fla_calls == []


@pytest.mark.parametrize("name", FLA)
def test_fla_has_the_parameters_that_are_relied_on(name):
    """Where it is installed (read in fla-core 0.6.0)."""
    pytest.importorskip("fla")
    module, function = name.split(".")
    takes = inspect.signature(getattr(import_module(f"fla.ops.{module}"), function)).parameters
    assert takes.keys() >= inspect.signature(stand_in_for(name, [])).parameters.keys()
