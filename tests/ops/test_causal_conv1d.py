"""causal_conv1d against its reference: taps, segments, states, layouts, what is frozen, what a launch depends on."""

import importlib
import math
import types
from collections.abc import Iterator

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from npu_trainer_kernels import backends
from npu_trainer_kernels.ops import Segments, causal_conv1d, causal_conv1d_reference, launch
from npu_trainer_kernels.ops.convolution import convolution_kernels as kernels
from npu_trainer_kernels.ops.convolution import places
from tests.closeness import assert_op_close
from tests.ops.test_shared_rows import Waits
from tests.pairs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TAPS = [1, 2, 3, 4, 8]
# Chunks are of 8 tokens in the interpreter: whole ones and a tail, none, fewer tokens than taps; segments of one token,
# of fewer tokens than taps, of whole chunks, and more of them than programs.
ROWS = {"rows": (2, 19), "whole chunks": (1, 16), "short rows": (3, 2), "one token": (2, 1)}
SEGMENTS = {
    "segments": (1, 2, 9, 1, 17, 3, 8),
    "whole segments": (8, 16),
    "one segment": (13,),
    "tokens": (1,) * 11,
    "pairs": (2,) * 12,
}
# Blocks are of 16 channels: one and a tail, whole ones, fewer.
CHANNELS = [21, 32, 5]


def segments_of(name, device):
    return Segments.make(SEGMENTS[name], device) if name in SEGMENTS else None


def make(device, dtype=torch.float32, taps=4, where="segments", channels=21, bias=True, state=True):
    """x as models have it, weight, bias and state."""
    batch, length = ROWS.get(where) or (1, sum(SEGMENTS[where]))
    rows = len(SEGMENTS[where]) if where in SEGMENTS else batch

    def drawn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    x = drawn(batch, length, channels).transpose(1, 2)
    given = [
        x,
        drawn(channels, taps),
        drawn(channels) if bias else None,
        drawn(rows, channels, taps - 1) if state else None,
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


def calls(backend, **options):
    def ours(x, weight, bias=None, state=None):
        return causal_conv1d(x, weight, bias, state=state, backend=backend, **options)

    def reference(x, weight, bias=None, state=None):
        return causal_conv1d_reference(x, weight, bias, state=state, **options)

    return ours, reference


def check(given, backend, **options):
    assert_op_close(*calls(backend, **options), given, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "taps", "dtype", "activation", "bias", "state", "channels"),
    pairs([*ROWS, *SEGMENTS], TAPS, DTYPES, [None, "silu"], [True, False], [True, False], CHANNELS),
    ids=str,
)
def test_matches_reference(device, backend, where, taps, dtype, activation, bias, state, channels):
    given = make(device, dtype, taps, where, channels, bias, state)
    check(given, backend, activation=activation, segments=segments_of(where, device), return_state=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_reference_computes_what_transformers_does(device, dtype, activation):
    given = make(device, dtype, where="rows", state=False)[:3]
    theirs = modeling_qwen3_next.causal_conv1d_fn
    assert_op_close(
        lambda *a: causal_conv1d_reference(*a, activation=activation), lambda *a: theirs(*a, activation=activation),
        given, upstream,
    )  # fmt: skip


@pytest.mark.parametrize("taps", [3, 4])
def test_a_state_is_what_transformers_keeps(device, backend, taps):
    """Step by step, from the state of the first tokens on."""
    x, weight, bias, state = (t.detach() for t in make(device, taps=taps, where="rows"))
    theirs = state.clone()
    for token in x.split(1, 2):
        y, state = causal_conv1d(
            token, weight, bias, activation="silu", state=state, return_state=True, backend=backend
        )
        expected = modeling_qwen3_next.causal_conv1d_update(token, theirs, weight, bias, "silu")
        torch.testing.assert_close(y, expected)
        assert torch.equal(state, theirs)


@pytest.mark.parametrize("cut", [1, 2, 11])
def test_two_parts_with_the_state_between_them_are_the_whole(device, backend, cut):
    given = make(device, torch.float32, where="rows")

    def in_parts(x, weight, bias, state):
        first, state = causal_conv1d(
            x[..., :cut], weight, bias, activation="silu", state=state, return_state=True, backend=backend
        )
        second = causal_conv1d(x[..., cut:], weight, bias, activation="silu", state=state, backend=backend)
        return torch.cat((first, second), 2)

    assert_op_close(in_parts, calls(backend, activation="silu")[1], given, upstream)


@pytest.mark.parametrize("where", ["rows", "short rows", "segments"])
def test_a_loss_of_the_state_alone(device, backend, where):
    given = make(device, where=where)
    options = {"segments": segments_of(where, device), "return_state": True}
    ours, reference = calls(backend, **options)
    x, *_, state = given
    found, expected = (torch.autograd.grad(upstream(f(*given)[1:]), (x, state)) for f in (ours, reference))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_that_differ(device, backend, dtype):
    """The weight's is not x's, as in a model whose parameters are fp32."""
    x, weight, bias, state = make(device, torch.bfloat16)
    weight, bias = (t.detach().to(dtype).requires_grad_() for t in (weight, bias))
    check([x, weight, bias, state], backend, activation="silu", segments=segments_of("segments", device))


def test_large_sums(device, backend):
    """Where the sigmoid is 0 or 1, and its exponential overflows."""
    x, *others = make(device)
    check(
        [(x.detach() * 200).requires_grad_(), *others],
        backend,
        activation="silu",
        segments=segments_of("segments", device),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Segments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bad", range(len(SEGMENTS["segments"])))
def test_no_segment_sees_another(device, backend, activation, bad):
    """NaN in one segment, its state and its gradient reaches no other; of segments alone the bits are the same."""
    segments = segments_of("segments", device)
    x, weight, bias, state = make(device)
    begin, end = (0, *segments.q_ends)[bad], segments.q_ends[bad]
    own = torch.zeros(x.shape[2], dtype=torch.bool, device=device)
    own[begin:end] = True

    def run(x, state, dy):
        y, last = causal_conv1d(
            x, weight, bias, activation=activation, segments=segments, state=state, return_state=True, backend=backend
        )
        return y, last, *torch.autograd.grad([y, last], (x, state), [dy, torch.ones_like(last)])

    dy = torch.randn_like(x)
    expected = run(x, state, dy)
    bad_x, bad_state, bad_dy = (t.detach().clone() for t in (x, state, dy))
    bad_x[..., own], bad_state[bad], bad_dy[..., own] = math.nan, math.nan, math.nan
    found = run(bad_x.requires_grad_(), bad_state.requires_grad_(), bad_dy)
    rows = torch.arange(len(segments), device=device) != bad
    for ours, clean in zip(found[::2], expected[::2], strict=True):
        assert torch.equal(ours[..., ~own], clean[..., ~own])
    for ours, clean in zip(found[1::2], expected[1::2], strict=True):
        assert torch.equal(ours[rows], clean[rows])
    if bad < len(segments) - 1:
        assert found[0][..., own].isnan().all()
    part = x[..., begin:end].detach()
    alone = causal_conv1d(part, weight, bias, activation=activation, state=state[bad : bad + 1], backend=backend)
    torch.testing.assert_close(expected[0][..., begin:end], alone)


def test_one_index_for_all_layers(device, backend, monkeypatch):
    made = []
    uploaded = places.uploaded
    monkeypatch.setattr(places, "uploaded", lambda *a: made.append(a) or uploaded(*a))
    segments = segments_of("segments", device)
    given = make(device)
    numbers = []
    for _ in range(3):
        torch.autograd.grad(upstream(calls(backend, segments=segments, return_state=True)[0](*given)), given)
        numbers.append(len(made))
    assert 0 < numbers[0] == numbers[2]


@pytest.mark.parametrize("activation", [None, "silu"])
def test_nothing_waits_for_the_device(device, backend, activation):
    segments, given = segments_of("segments", device), make(device)
    run = calls(backend, segments=segments, activation=activation, return_state=True)[0]
    run(*given)  # a device's first call tries the kernels, and reads what they have computed
    with Waits() as waits:
        y, last = run(*given)
        torch.autograd.grad([y, last], given, [torch.ones_like(y), torch.ones_like(last)])
    assert waits.found == []


@pytest.fixture
def launches(device) -> Iterator[list[tuple[str, tuple, dict, dict]]]:
    """Name, grid, constants and specialised numbers of every launch of this op's own kernels inside the test."""
    found = []
    trained(make(device), segments=segments_of("segments", device))  # a device's first call tries the kernels

    def spy(kernel, grid, args, constexprs):
        launch._run(kernel, grid, args, constexprs)
        if kernel in (kernels._forward_kernel, kernels._backward_kernel):
            numbers = dict(zip(kernel.arg_names, args, strict=False))
            numbers = {n: v for n, v in numbers.items() if not isinstance(v, torch.Tensor) and n not in LENGTHS}
            found.append((kernel.__name__, grid, constexprs, numbers))

    # Backward would launch on a thread of its own, where this launcher is not known.
    with launch.use_launcher(spy), torch.autograd.set_multithreading_enabled(False):
        yield found


# What depends on lengths, so that Triton must not specialise on it.
LENGTHS = {
    "x_row", "x_channel", "y_row", "y_channel", "dy_row", "dy_channel", "dx_row", "dx_channel", "n_tasks", "per_row",
    "length",
}  # fmt: skip


def trained(given, **options):
    """Calls the op and runs backward, with a gradient in the layout of x."""
    y = causal_conv1d(*given[:3], state=given[3], activation="silu", backend="triton", **options)
    y.backward(torch.ones_like(y))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_no_kernel_is_compiled_for_new_lengths(device, launches, packed, turned):
    def run(*lengths):
        launches.clear()
        length = sum(lengths)
        x = torch.randn(1, length, 21, device=device).transpose(1, 2)
        x = (x.contiguous() if turned else x).requires_grad_()
        state = torch.randn(len(lengths) if packed else 1, 21, 3, device=device).requires_grad_()
        trained([x, *make(device)[1:3], state], segments=Segments.make(lengths, device) if packed else None)
        return [(name, constants, numbers) for name, _, constants, numbers in launches]

    first = run(5, 11)
    assert [name for name, *_ in first] == ["_forward_kernel", "_backward_kernel"]
    assert first == run(7) == run(16, 16, 3) == run(*[7] * 9)


def test_many_short_segments_share_programs(device, launches):
    """Each program writes the sums of its chunks."""
    trained(make(device, where="pairs"), segments=segments_of("pairs", device))
    (_, (forward, _), *_), (_, (backward, _), *_) = launches
    if device.type == "cpu":
        assert forward == len(SEGMENTS["pairs"])
        assert backward == math.ceil(2 * forward / 8)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts, frozen tensors, repetition
# ---------------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "tokens side by side": lambda x: x.contiguous(),
    "part of a wider projection": lambda x: (
        torch.cat((x, x, x), 1).transpose(1, 2).contiguous()[..., 21:42].transpose(1, 2)
    ),
    "part of a wider projection, tokens side by side": lambda x: torch.cat((x, x), 1).contiguous()[:, :21],
    "every other token": lambda x: x.repeat_interleave(2, 2).transpose(1, 2).contiguous()[:, ::2].transpose(1, 2),
    "every other channel": lambda x: x.repeat_interleave(2, 1).transpose(1, 2).contiguous()[..., ::2].transpose(1, 2),
}


@pytest.mark.parametrize(
    ("layout", "of", "where"),
    [*pairs([*LAYOUTS], ["x", "dy", "state"], ["rows", "segments"]), (None, "weight", "rows")],
)
def test_strides(device, backend, layout, of, where):
    """The same bits in every layout."""
    x, weight, bias, state = make(device, where=where)
    dy = torch.randn_like(x)

    def run(x, dy, state, weight):
        y, last = causal_conv1d(
            x, weight, bias, activation="silu", segments=segments_of(where, device), state=state, return_state=True,
            backend=backend,
        )  # fmt: skip
        return y, last, *torch.autograd.grad([y, last], (x, weight, bias, state), [dy, torch.ones_like(last)])

    given = {"x": x, "dy": dy, "state": state, "weight": weight}
    expected = run(**given)
    if of == "weight":
        changed = weight.detach().t().contiguous().t()
    else:
        changed = LAYOUTS[layout](given[of].detach())
        assert torch.equal(changed, given[of])
    given[of] = changed.requires_grad_(of != "dy")
    found = run(**given)
    if backend == "triton":
        assert all(map(torch.equal, found, expected))
    for ours, clean in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, clean)


def test_y_has_the_layout_of_x(device, backend):
    x, weight, bias, state = make(device, where="rows")
    y = causal_conv1d(x, weight, bias, state=state, backend="triton")
    assert y.stride() == x.stride()
    y = causal_conv1d(x.contiguous(), weight, bias, state=state, backend="triton")
    assert y.is_contiguous()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("learned", [(0,), (1,), (2,), (3,), (0, 3), (1, 2), (0, 1, 2), ()], ids=str)
def test_frozen(device, backend, activation, learned):
    given = [t.detach().requires_grad_(i in learned) for i, t in enumerate(make(device))]
    segments = segments_of("segments", device)
    check(given, backend, activation=activation, segments=segments, return_state=True)
    y = causal_conv1d(*given[:3], state=given[3], activation=activation, segments=segments, backend=backend)
    assert y.requires_grad == bool(learned)


def test_without_activation_a_frozen_weight_keeps_no_input(device, backend):
    x, weight, *_ = (t if t is None else t.detach() for t in make(device))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        causal_conv1d(x.requires_grad_(), weight, segments=segments_of("segments", device), backend=backend)
    assert [t.data_ptr() for t in kept] == [weight.data_ptr()]


def test_same_bits_twice(device, backend):
    given = make(device, torch.bfloat16, where="pairs")
    ours, _ = calls(backend, activation="silu", segments=segments_of("pairs", device), return_state=True)
    runs = []
    for _ in range(2):
        outputs = ours(*given)
        runs.append([*outputs, *torch.autograd.grad(upstream(outputs), given)])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("shape", [(0, 21, 5), (2, 21, 0), (0, 21, 0)], ids=str)
def test_nothing(device, backend, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    _, weight, bias, _ = make(device)
    state = torch.randn(shape[0], 21, 3, device=device, requires_grad=True)
    y, last = causal_conv1d(x, weight, bias, activation="silu", state=state, return_state=True, backend=backend)
    assert y.shape == shape
    found = torch.autograd.grad(y.sum() + (2 * last).sum(), (x, weight, bias, state))
    assert not any(g.any() for g in found[:3])
    if not shape[2]:
        assert torch.equal(last, state)
        assert torch.equal(found[3], torch.full_like(state, 2))


@pytest.mark.parametrize("where", ["rows", "segments"])
def test_torch_compile(device, where):
    """Without segments in one graph; with them the op is called."""
    given = make(device, where=where)
    options = {"activation": "silu", "segments": segments_of(where, device), "return_state": True}

    def model(op):
        def run(x, weight, bias, state):
            y, last = op(torch.tanh(x), weight, bias, state=state, **options)
            return y * 2, last

        return run

    compiled = torch.compile(model(causal_conv1d), backend="aot_eager", fullgraph=where == "rows")
    assert_op_close(compiled, model(causal_conv1d_reference), given, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


def shared():
    return Segments.make([4, 3], "cpu", [4, 7], None)


BAD = [
    ({"x": torch.zeros(1, 5, 7).double()}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    ({"x": torch.zeros(5, 7)}, ValueError, r"x must have shape \[B, C, L\]; got \[5, 7\]"),
    ({"weight": torch.zeros(5, 9)}, ValueError, r"weight must have shape \[5, K\].*1 <= K <= 8; got \[5, 9\]"),
    ({"weight": torch.zeros(5, 0)}, ValueError, r"1 <= K <= 8; got \[5, 0\]"),
    ({"weight": torch.zeros(4, 3)}, ValueError, r"weight must have shape \[5, K\].*got \[4, 3\]"),
    ({"weight": torch.zeros(5, 1, 3)}, ValueError, r"got \[5, 1, 3\]"),
    ({"weight": 3}, TypeError, "weight must be a tensor; got int"),
    ({"bias": torch.zeros(4)}, ValueError, r"bias must have shape \[5\] and weight's dtype torch.float32; got \[4\]"),
    ({"bias": torch.zeros(5).half()}, ValueError, "weight's dtype torch.float32; got .* of torch.float16"),
    ({"activation": "gelu"}, ValueError, "activation must be None or 'silu'; got 'gelu'"),
    ({"state": torch.zeros(1, 5, 3)}, ValueError, r"state must have shape \[1, 5, 2\].*got \[1, 5, 3\]"),
    ({"state": torch.zeros(1, 5, 2).half()}, ValueError, "x's dtype torch.float32; got .* of torch.float16"),
    ({"segments": Segments.make([3, 3], "cpu")}, ValueError, r"x must have shape \[1, C, 6\].*got \[1, 5, 7\]"),
    (
        {"segments": Segments.make([3, 4], "cpu"), "state": torch.zeros(1, 5, 2)}, ValueError,
        r"state must have shape \[2, 5, 2\]",
    ),
    ({"segments": [3, 4]}, TypeError, "segments must be None or a Segments; got list"),
    ({"segments": shared()}, ValueError, "segments must share no keys"),
    ({"weight": torch.zeros(5, 3, device="meta")}, ValueError, "all tensors must be on one device"),
    ({"backend": "cudnn"}, ValueError, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, error, message):
    given = {"x": torch.zeros(1, 5, 7), "weight": torch.zeros(5, 3), **change}
    with pytest.raises(error, match=message):
        causal_conv1d(**given)


# ---------------------------------------------------------------------------------------------------------------------
# The trial on a device
# ---------------------------------------------------------------------------------------------------------------------

MODULE = importlib.import_module("npu_trainer_kernels.ops.convolution.causal_conv1d")


def tried(device, backend, taps=4, silu=True, biased=True, dtype=torch.float32, of_weight=torch.float32):
    return MODULE._trial.__wrapped__(torch.device(device), dtype, of_weight, taps, silu, biased, backend)


@pytest.mark.parametrize(
    ("taps", "silu", "biased"), [(1, True, False), (2, False, True), (4, True, True), (8, True, False)]
)
def test_right_kernels_pass_their_trial(device, backend, taps, silu, biased):
    assert tried(device, backend, taps, silu, biased) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_they_pass_it_too(device, backend, dtype):
    assert tried(device, backend, dtype=dtype, of_weight=dtype) is None
    assert tried(device, backend, dtype=dtype) is None


@pytest.mark.parametrize("which", range(4))
def test_a_wrong_gradient_fails_it(device, backend, which, monkeypatch):
    """As if the compiler had dropped a part of one of the four."""
    own = MODULE._backward

    def planted(*args):
        found = list(own(*args))
        if args[-1] == backend and args[0].dtype == torch.bfloat16:
            found[which] = found[which] * 0.9
        return tuple(found)

    monkeypatch.setattr(MODULE, "_backward", planted)
    reason = tried(device, backend, dtype=torch.bfloat16, of_weight=torch.bfloat16)
    assert reason is not None
    assert reason.startswith("its kernel gives other numbers there")


def test_torch_takes_over_from_kernels_that_fail_it(monkeypatch):
    monkeypatch.delenv("NPU_KERNELS_STRICT", raising=False)
    card, seen = torch.device("cuda"), []
    monkeypatch.setattr(MODULE, "_trial", lambda where, *form: seen.append(form) or "planted")
    monkeypatch.setattr(MODULE.device, "spec", lambda where: types.SimpleNamespace(has_warps=where.type == "cuda"))
    try:
        with pytest.warns(RuntimeWarning, match="causal_conv1d: torch takes over .* planted"):
            assert MODULE._after_trial("triton", card, torch.float32, 4) == "torch"
        assert seen == [(torch.float32, 4, "triton")]
        assert backends.has_failed("causal_conv1d", card)
        strict = backends._strictly("triton")
        with pytest.raises(launch.KernelError, match=r"^causal_conv1d: planted$"):
            MODULE._after_trial(strict, card, torch.float32, 4)
    finally:
        backends.forget_failures()
    assert MODULE._after_trial("torch", card) == "torch"
    assert MODULE._after_trial("triton", torch.device("cpu")) == "triton"
    assert MODULE._after_trial("triton", torch.device("meta")) == "triton"
    monkeypatch.setattr(MODULE, "_trial", lambda *_: None)
    assert MODULE._after_trial("triton", card) == "triton"
