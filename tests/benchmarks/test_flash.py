"""transformers' flash attention without the package: padding is left out, and live tokens have what they have under a
mask. A softmax row by row stands for the kernel, and for PyTorch's operator its documented meaning."""

import functools
import importlib
from collections import Counter

import pytest
import torch

from benchmarks import endtoend, flash, models, step_cases
from tests.closeness import assert_as_close, rounded
from tests.ops.test_segment_kernels import flash_backward, flash_forward

UTILS = "transformers.modeling_flash_attention_utils"
# What transformers keeps of the flash attention that it has loaded last. Not every version has all of these.
KEPT = (
    "_lazy_imports", "_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
    "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn",
)  # fmt: skip


@pytest.fixture
def utils(monkeypatch):
    """transformers' module of flash attention; afterwards transformers is as it was."""
    from transformers import AttentionInterface, AttentionMaskInterface

    found = importlib.import_module(UTILS)
    for name in KEPT:
        if hasattr(found, name):
            monkeypatch.setattr(found, name, getattr(found, name))
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    monkeypatch.setattr(flash, "CALLS", Counter())
    return found


def one_row(q, k, v, scale, causal, window):
    """`[Lq, H, D]` of q `[Lq, H, D]`, k and v `[Lk, K, D]`: the last query and the last key are aligned."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    ahead = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q) - torch.arange(len(k))
    before, behind = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if before >= 0:
        hidden |= ahead > before
    if behind >= 0:
        hidden |= ahead < -behind
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def row_by_row(q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, scale, causal, window):
    """`flash._attention` for a CPU, in plain PyTorch and with its autograd."""
    assert not dropout
    if cu_q is None:
        return torch.stack([one_row(*row, scale, causal, window) for row in zip(q, k, v, strict=True)])
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    rows = zip(*(t.split(cu.diff().tolist()) for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k))), strict=True)
    return torch.cat([one_row(*row, scale, causal, window) for row in rows])


@pytest.fixture
def given(utils, monkeypatch):
    """The positions that each call of the kernel is given; it computes row by row."""
    found = []

    def noted(q, *rest):
        found.append(q.shape[:-2].numel())
        return row_by_row(q, *rest)

    monkeypatch.setattr(flash, "_attention", noted)
    return found


def outputs(size, attention, ids, mask, dtype=torch.float32):
    """A model's logits at live tokens, and the gradients of its weights by a loss of these."""
    model = models.build_model(size, attention).cpu().to(dtype)
    logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    logits.logsumexp(-1).mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


MASKS = {
    "padded behind": [[1] * 9, [1] * 6 + [0] * 3, [1] + [0] * 8],
    "padded before": [[0] * 2 + [1] * 7, [1] * 9, [0] * 5 + [1] * 4],
    # A prompt that is padded before, and a completion that is padded behind.
    "on both sides": [[0] * 3 + [1] * 4 + [0] * 2, [1] * 8 + [0], [0] + [1] * 8],
    "no padding": [[1] * 9] * 3,
}


# Grouped heads, and a window of four tokens beside them.
@pytest.mark.parametrize("size", ["tiny-llama", "tiny-qwen3", "tiny-gemma3"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_live_tokens_have_what_they_have_under_a_mask(size, mask, given):
    mask = torch.tensor(mask)
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    expected = outputs(size, None, ids, mask)
    assert given == []
    found = outputs(size, flash.NAME, ids, mask)
    layers = models.MODELS[size][1]["num_hidden_layers"]
    # In each layer nothing but the live tokens.
    assert given == [int(mask.sum())] * layers
    assert dict(flash.CALLS) == {"flash dense" if mask.all() else "flash varlen": layers}
    assert max(float(t.abs().max()) for t in found) > 0.1
    truth = outputs(size, None, ids, mask, torch.float64)
    moved = functools.cache(lambda: rounded(lambda: outputs(size, None, ids, mask)))
    for i, (a, r, t) in enumerate(zip(found, expected, truth, strict=True)):
        assert_as_close(a, r, t, f"result {i}", lambda i=i: [results[i] for results in moved()])


# ---------------------------------------------------------------------------------------------------------------------
# What PyTorch's operator is asked for
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def operators(monkeypatch):
    """PyTorch's operators of flash attention take CPU tensors. A batch without padding is rows of one length."""
    monkeypatch.setattr(flash, "CALLS", Counter())
    called = []

    def lengths(cu, t, longest):
        return cu if cu is not None else torch.arange(0, len(t) * longest + 1, longest, dtype=torch.int32)

    def flat(t, cu):
        return t if cu is not None else t.flatten(0, 1)

    def of(q, options):
        """An operator's options, of which a scale of None is not passed on."""
        return {"scale": q.shape[-1] ** -0.5, **options}

    def forward(q, k, v, cu_q, cu_k, longest_q, longest_k, *rest, **options):
        called.append("forward")
        out, *others = flash_forward(
            flat(q, cu_q), flat(k, cu_k), flat(v, cu_k), lengths(cu_q, q, longest_q), lengths(cu_k, k, longest_k),
            longest_q, longest_k, *rest, **of(q, options),
        )  # fmt: skip
        return out.view_as(q), *others

    def backward(dy, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, *rest, **options):
        called.append("backward")
        found = flash_backward(
            flat(dy, cu_q), flat(q, cu_q), flat(k, cu_k), flat(v, cu_k), flat(out, cu_q), lse,
            lengths(cu_q, q, longest_q), lengths(cu_k, k, longest_k), longest_q, longest_k, *rest,
            **of(q, options),
        )  # fmt: skip
        return tuple(t.view_as(like) for t, like in zip(found, (q, k, v), strict=True))

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    yield called
    library._destroy()


@pytest.mark.parametrize("window", [(-1, -1), (3, 3)], ids=["", "window"])
@pytest.mark.parametrize("scale", [None, 0.7], ids=["", "scale"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "dense"])
def test_the_operator_is_asked_for_the_same(padded, scale, window, operators):
    drawn = torch.Generator().manual_seed(0)
    positions = (15,) if padded else (3, 5)
    *given, dy = (torch.randn(*positions, heads, 16, generator=drawn).bfloat16() for heads in (4, 2, 2, 4))
    given = [t.requires_grad_() for t in given]
    cu = torch.tensor([0, 7, 8, 15], dtype=torch.int32) if padded else None
    longest = 7 if padded else 5
    lengths = (cu, cu, torch.tensor(7), longest) if padded else ()
    function = flash.varlen if padded else flash.dense
    out = function(*given, *lengths, softmax_scale=scale, causal=True, window_size=window)
    found = [out, *torch.autograd.grad(out, given, dy)]
    assert operators == ["forward", "backward"]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = row_by_row(*exact, cu, cu, longest, longest, 0.0, scale, True, window)
    expected = [out, *torch.autograd.grad(out, exact, dy.double())]
    # Of bf16 and its rounding of o and of each gradient.
    assert all((one - other).norm() < 0.01 * other.norm() for one, other in zip(found, expected, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# The variants
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workload",
    [
        step_cases.StepWorkload("sft-trainer", "tiny-llama", 4, 40, lengths="exponential"),
        step_cases.StepWorkload("grpo-trl", "tiny-qwen3", 4, 20, 12, lengths="exponential", group=2),
        step_cases.StepWorkload("dpo-trl", "tiny-llama", 2, 12, 2, 3),
    ],
    ids=lambda workload: workload.name,
)
def test_a_step_is_the_same_without_padding(workload, given):
    plain = endtoend.train(workload, "plain", steps=2)
    assert given == []
    found = endtoend.train(workload, "plain-flash", steps=2)
    assert plain["ran"] == {}
    assert found["ran"] == {"flash varlen": len(given)}
    # The second step is the one that counts.
    assert given[-1] == found["tokens"] == plain["tokens"] < found["positions"]
    assert not endtoend.differs({**found, "dtype": "float32"}, {**plain, "dtype": "float32"})


def test_only_batches_with_padding_in_16_bits_run_by_it():
    for kind in ("cuda", "npu"):
        for workload in step_cases.workloads(kind):
            padded = workload.has_padding and not workload.generates
            found = {"plain-flash", "liger-flash"} & set(step_cases.variants_of(workload))
            assert len(found) == 2 * padded, workload.key
    # On a CPU there is no such kernel.
    assert not any("flash" in name for w in step_cases.workloads("cpu") for name in step_cases.variants_of(w))


def test_transformers_keeps_its_other_attentions(utils, monkeypatch):
    asked = []
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **options: asked.append((args, options)))
    flash.register()
    once = utils._lazy_imports
    flash.register()
    assert utils._lazy_imports is once
    assert utils._lazy_imports(flash.NAME)[:3] == (flash.dense, flash.varlen, None)
    assert asked == []
    utils._lazy_imports("flash_attention_2", None, allow_all_kernels=True)
    # On an NPU transformers has its own functions, whatever the name.
    monkeypatch.setattr(utils, "is_torch_npu_available", lambda: True)
    utils._lazy_imports(flash.NAME)
    assert asked == [(("flash_attention_2", None), {"allow_all_kernels": True}), ((flash.NAME,), {})]
