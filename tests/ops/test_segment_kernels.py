"""Attention inside segments by one kernel: flash attention and the vendor's operator, by their documented meaning on
the CPU, held to a masked softmax over the whole packed row; and what calls they are given."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from npu_trainer_kernels import backends, ops
from npu_trainer_kernels import device as devices
from npu_trainer_kernels import vendor as vendor_module
from npu_trainer_kernels.ops import varlen_attention
from npu_trainer_kernels.ops.attention import segment_kernels
from tests.npu_contract import operators
from tests.npu_contract.calls import Recorder
from tests.npu_contract.test_schemas import SCHEMAS
from tests.ops.test_shared_rows import Waits
from tests.ops.test_varlen_attention import HEADS, LAYOUTS, OPTIONS, PLAIN, SHARED, Layout, check, tensors, upstream

# The package's name for it is the function.
op = import_module("npu_trainer_kernels.ops.attention.varlen_attention")


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
    monkeypatch.setattr(devices, "widest_flash_head", lambda device: 256)
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
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
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
        monkeypatch.setattr(segment_kernels, "_found", lambda: function)

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
    monkeypatch.setattr(segment_kernels, "_is_replaced", lambda: True)
    varlen_attention(q, k, v, segments, dropout=0.5)
    assert flash == ["forward"] * 2


def test_which_chips_have_flash_attention(monkeypatch):
    widest = devices.widest_flash_head.__wrapped__
    assert widest(torch.device("cpu")) == 0
    chips = {(7, 5): 0, (8, 0): 256, (8, 6): 192, (8, 9): 192, (9, 0): 256, (10, 0): 256, (12, 0): 192}
    for built, expected in ((True, chips), (False, dict.fromkeys(chips, 0))):
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda built=built: built)
        for chip, size in expected.items():
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, chip=chip: chip)
            assert widest(torch.device("cuda", 0)) == size


def test_an_installed_package(monkeypatch, tmp_path):
    """FA3 before FA2; one that cannot be imported is said, and left alone."""
    found = segment_kernels._found.__wrapped__
    monkeypatch.syspath_prepend(tmp_path)
    assert found() is None
    (tmp_path / "flash_attn.py").write_text("def flash_attn_varlen_func(): ...")
    assert found().__module__ == "flash_attn"
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol')")
    with pytest.warns(UserWarning, match="goes without flash_attn_interface, .* undefined symbol"):
        assert found().__module__ == "flash_attn"
    (tmp_path / "flash_attn_interface.py").write_text("def flash_attn_varlen_func(): ...")
    monkeypatch.delitem(sys.modules, "flash_attn")
    assert found().__module__ == "flash_attn_interface"
    for name in ("flash_attn", "flash_attn_interface"):
        sys.modules.pop(name, None)


# ---------------------------------------------------------------------------------------------------------------------
# The vendor's operator: its documented meaning, on the CPU
# ---------------------------------------------------------------------------------------------------------------------

OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_grad")


@pytest.fixture
def vendor(monkeypatch) -> Iterator[str]:
    """An NPU's chip, and the operators with torch_npu's schemas for CPU tensors (`tests/npu_contract` holds both to
    torch_npu)."""
    schemas = {name: SCHEMAS[name] for name in OPERATORS}
    caches = vendor_module.unavailable, vendor_module._takes_sinks, backends._by_table
    monkeypatch.setattr(devices, "torch_npu_error", lambda: None)
    with operators.defined(schemas), operators.on_cpu(OPERATORS), devices.use_chip("Ascend910B4"):
        for cache in caches:
            cache.cache_clear()
        yield "vendor"
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def npu(vendor, monkeypatch) -> torch.device:
    """The CPU is given an NPU's table."""
    monkeypatch.setattr(devices, "kind_of", lambda device: "npu")
    return torch.device("cpu")


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("options", ["causal", "scale", "window 1", "window 3", "a window wider than all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_vendors_operator(layout, options, sinks, vendor, cpu):
    layout = LAYOUTS[layout]
    with Recorder() as recorder:
        check(layout, tensors(layout, cpu, torch.bfloat16, size=16, sinks=sinks), vendor, **OPTIONS[options])
    assert recorder.names == set(OPERATORS)


def test_on_an_npu_it_is_the_vendors(npu):
    with Recorder() as recorder:
        check(SHARED, tensors(SHARED, npu, torch.float16, (12, 4)), None)
    assert recorder.names == set(OPERATORS)


def test_the_vendors_operator_gets_the_hosts_lists_and_waits_for_nothing(npu, monkeypatch):
    """The ends of the segments are the tuples that were made with them; the mask is made once for a device."""
    given = tensors(SHARED, npu, torch.bfloat16, size=16, sinks=True)
    segments = SHARED.segments(npu)
    seen = []
    arguments = vendor_module._attention_arguments

    def noted(*args):
        seen.append(arguments(*args))
        return seen[-1]

    monkeypatch.setattr(vendor_module, "_attention_arguments", noted)
    q, k, v, sinks = given
    with Waits() as waits:
        out = varlen_attention(q, k, v, segments, sinks=sinks, window=3)
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert waits.found == []
    forward, backward = seen
    assert forward["actual_seq_qlen"] is backward["actual_seq_qlen"] is segments.q_ends
    assert forward["actual_seq_kvlen"] is backward["actual_seq_kvlen"] is segments.k_ends
    assert forward["atten_mask"] is backward["atten_mask"] is vendor_module._causal(q.device)


UNCOVERED = {
    "softcap": ({"softcap": 2.0}, r"softcap=2.0: npu_fusion_attention has none"),
    "two sizes": ({"head_sizes": (192, 128)}, "heads of 192 elements with values of 128"),
    "wide heads": ({"head_sizes": (1024, 1024)}, "heads of 1024 elements, of which 768 are allowed"),
    "fp64": ({"dtype": torch.float64}, "float64 q, k and v"),
    "sinks in fp32": ({"sinks": True, "dtype": torch.float32}, "sinks in float32: their backward takes 16 bits"),
    "many segments": ({"segments": 1025}, "1025 segments, of which 1024 are allowed"),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_an_npu_does_not_serve(name, npu):
    changes, message = UNCOVERED[name]
    given = {"dtype": torch.bfloat16, "head_sizes": (128, 128), **changes}
    assert message in op.unserved(npu, **given)
    # Who asks for torch by name gets one segment after another; who asks for the vendor is told when it is called.
    assert op.unserved(npu, **given, backend="varlen_attention=torch") is None
    assert op.unserved(npu, **given, backend="varlen_attention=vendor") is None


def test_what_is_served(npu, monkeypatch):
    for given in ({}, {"window": 128}, {"dropout": 0.1}, {"sinks": True}, {"segments": 1024}):
        assert op.unserved(npu, torch.bfloat16, (128, 128), **given) is None
    # A version whose operators lack the argument.
    monkeypatch.setattr(vendor_module, "_takes_sinks", lambda: False)
    assert "has no argument for them" in op.unserved(npu, torch.bfloat16, (128, 128), sinks=True)
    monkeypatch.setattr(vendor_module, "unavailable", lambda name: "this torch_npu lacks it")
    backends._by_table.cache_clear()
    assert "not vendor: this torch_npu lacks it" in op.unserved(npu, torch.bfloat16, (128, 128))


def test_elsewhere_all_is_served(device):
    for changes, _ in UNCOVERED.values():
        given = {"dtype": torch.bfloat16, "head_sizes": (128, 128), **changes}
        assert op.unserved(device, **given) is None
    assert op.unserved(device, torch.int8, (128, 128)) == "attention has no int8"


def test_what_the_vendor_does_not_cover_goes_one_segment_after_another(npu):
    given = [(4 * t).round() / 4 for t in tensors(Layout((1,) * 1025), npu, torch.bfloat16)]  # exact in any order
    segments = Layout((1,) * 1025).segments(npu)
    with Recorder() as recorder:
        found = varlen_attention(*given, segments)
    assert recorder.names == set()
    assert torch.equal(found, given[2].repeat_interleave(2, 1))
    with pytest.raises(ValueError, match=r"does not cover this call: 1025 segments.* it covers up to 1024 segments"):
        varlen_attention(*given, segments, backend="vendor")


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def test_sinks_that_are_ignored_are_seen(flash, cpu, monkeypatch):
    forward = segment_kernels._flash_forward
    monkeypatch.setitem(
        segment_kernels._KERNELS, "flash",
        (lambda q, k, v, sinks, *rest: forward(q, k, v, None, *rest), segment_kernels._flash_backward),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="result 0"):
        check(SHARED, tensors(SHARED, cpu, torch.bfloat16, size=16, sinks=True))


def without_the_window_on_an_npu(monkeypatch):
    original = vendor_module._attention_arguments
    monkeypatch.setattr(
        vendor_module, "_attention_arguments", lambda q, sinks, segments, options: original(
            q, sinks, segments, op.replace(options, window=None)
        ),
    )  # fmt: skip


def a_window_one_too_wide_on_an_npu(monkeypatch):
    original = vendor_module._attention_arguments
    monkeypatch.setattr(
        vendor_module, "_attention_arguments", lambda q, sinks, segments, options: original(
            q, sinks, segments, op.replace(options, window=options.window + 1)
        ),
    )  # fmt: skip


def without_the_sinks_on_an_npu(monkeypatch):
    forward, backward = segment_kernels._KERNELS["vendor"]
    monkeypatch.setitem(
        segment_kernels._KERNELS, "vendor", (lambda q, k, v, sinks, *rest: forward(q, k, v, None, *rest), backward)
    )


@pytest.mark.parametrize(
    "fault", [without_the_window_on_an_npu, a_window_one_too_wide_on_an_npu, without_the_sinks_on_an_npu],
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_a_fault_on_an_npu_is_seen(fault, vendor, cpu, monkeypatch):
    given = tensors(SHARED, cpu, torch.bfloat16, size=16, sinks=True)
    check(SHARED, given, vendor, window=3)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="result 0"):
        check(SHARED, given, vendor, window=3)
