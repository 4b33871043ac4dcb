"""linear_divergence against its reference: every divergence and reduction, gradients, masks, options, bad input."""

import importlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_trainer_kernels.ops import linear_divergence, linear_divergence_reference
from npu_trainer_kernels.ops.head import divergence, engine
from npu_trainer_kernels.ops.head.linear_divergence import OUTPUTS
from tests.closeness import assert_op_close
from tests.pairs import pairs

N, H, V = 11, 12, 150
# Whose hidden states are wider, and whose vocabulary is padded to another size.
TEACHER_H, PADDED = 20, 160
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BETAS = [0, 0.3, 0.5, 1]
REDUCTIONS = ["mean", "sum", "none"]
MASKS = {"none": None, "some": [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0], "one": [0] * 10 + [3]}
OPTIONS = [
    {},
    {"temperature": 0.6},
    {"softcap": 3.0, "temperature": 1.7},
    {"logit_scale": 0.5, "teacher_temperature": 2.0},
    {"softcap": 2.0, "logit_scale": 0.5, "teacher_softcap": 4.0, "teacher_logit_scale": 0.7},
]
SIZES = [(V, V), (V, PADDED), (PADDED, V)]


def make(device, dtype=torch.float32, sizes=(V, V), bias=True, frozen=False, scale=0.3):
    """x, weight, teacher_x, teacher_weight, bias, teacher_bias."""
    ours, its = sizes
    x = torch.randn(N, H, device=device).to(dtype).requires_grad_()
    weight = (scale * torch.randn(ours, H, device=device)).to(dtype).requires_grad_(not frozen)
    teacher_x = torch.randn(N, TEACHER_H, device=device).to(dtype)
    teacher_weight = (scale * torch.randn(its, TEACHER_H, device=device)).to(dtype)
    b = torch.randn(ours, device=device).to(dtype).requires_grad_(not frozen) if bias else None
    teacher_b = torch.randn(its, device=device).to(dtype) if bias else None
    return [x, weight, teacher_x, teacher_weight, b, teacher_b]


def mask_of(name, device):
    values = MASKS[name]
    return None if values is None else torch.tensor(values, device=device)


def weighted(outputs):
    """Upstream gradients that differ from token to token, and from output to output."""
    total = 0.0
    for i, output in enumerate(outputs):
        if output is not None and (i == 0 or output.requires_grad):
            factors = torch.sin(torch.arange(output.numel(), device=output.device) + i + 1.0).view(output.shape)
            total = total + (output * factors).sum()
    return total


def check(device, backend, inputs, upstream=weighted, **options):
    assert_op_close(
        lambda *a: linear_divergence(*a, backend=backend, **options),
        lambda *a: linear_divergence_reference(*a, **options),
        inputs,
        upstream,
    )


@pytest.mark.parametrize(
    ("beta", "options", "dtype", "reduction", "mask", "sizes"),
    pairs(BETAS, OPTIONS, DTYPES, REDUCTIONS, list(MASKS), SIZES), ids=str,
)  # fmt: skip
def test_matches_reference(device, backend, dtype, beta, options, reduction, mask, sizes):
    inputs = make(device, dtype, sizes)
    check(device, backend, inputs, beta=beta, reduction=reduction, mask=mask_of(mask, device), **options)


@pytest.mark.parametrize(
    ("beta", "reduction", "mask", "dtype", "options"), pairs(BETAS, REDUCTIONS, ["none", "some"], DTYPES, OPTIONS[1:3]),
    ids=str,
)  # fmt: skip
def test_every_output_and_its_gradient(device, backend, beta, reduction, mask, dtype, options):
    """A loss of the divergence and of the student's log-probabilities and entropies, as distillation beside
    cross-entropy is."""
    ids = torch.randint(0, V, (N,), device=device)
    ids[:2] = torch.tensor([0, V - 1])
    check(
        device, backend, make(device, dtype), beta=beta, reduction=reduction, mask=mask_of(mask, device), ids=ids,
        outputs=OUTPUTS, **options,
    )  # fmt: skip


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_frozen_head(device, backend, beta, reduction):
    check(device, backend, make(device, frozen=True), beta=beta, reduction=reduction, mask=mask_of("some", device))


@pytest.mark.parametrize("frozen", [0, 1, 4])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    check(device, backend, inputs, beta=0.3, reduction="none")
    check(device, backend, inputs, beta=0.3, reduction="mean")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_teacher_gets_no_gradient(device, backend, reduction):
    inputs = [t.detach().requires_grad_() for t in make(device)]
    linear_divergence(*inputs, beta=0.5, reduction=reduction, backend=backend).sum().backward()
    assert all((t.grad is None) == (i in (2, 3, 5)) for i, t in enumerate(inputs))
    outputs = linear_divergence(
        *inputs, beta=0.5, ids=torch.zeros(N, dtype=torch.int64, device=device), outputs=OUTPUTS, backend=backend
    )
    assert not outputs.teacher_log_prob.requires_grad
    assert not outputs.teacher_entropy.requires_grad


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["one-hot teacher", "one-hot student", "both", "far apart", "cold"])
def test_extreme_distributions(device, backend, beta, kind):
    x, weight, teacher_x, teacher_weight, _, _ = make(device, bias=False, scale=1.0)
    options = {"temperature": 1e-2} if kind == "cold" else {}
    with torch.no_grad():
        x.mul_(100.0 if kind in ("one-hot student", "both") else 1.0)
        teacher_x.mul_(100.0 if kind in ("one-hot teacher", "both") else 1.0)
        if kind == "far apart":
            x.mul_(30.0)
            teacher_x.mul_(-30.0)
    for reduction in ("sum", "none"):
        check(
            device, backend, [x, weight, teacher_x, teacher_weight, None, None], beta=beta, reduction=reduction,
            **options,
        )  # fmt: skip


@pytest.mark.parametrize("beta", BETAS)
def test_two_equal_heads_have_no_divergence(device, backend, beta):
    x, weight, _, _, b, _ = make(device)
    divergences = linear_divergence(x, weight, x, weight, b, b, beta=beta, reduction="none", backend=backend)
    assert divergences.abs().max() < 1e-6
    gradients = torch.autograd.grad(divergences.sum(), (x, weight, b))
    assert all(g.abs().max() < 1e-5 for g in gradients)


def test_the_mixture_lies_between_the_ends(device, backend):
    """As beta goes to either end, the divergence over beta (1 - beta) goes to the KL of that end."""
    inputs = [None if t is None else t.detach() for t in make(device)]

    def of(beta):
        return linear_divergence(*inputs, beta=beta, reduction="none", backend=backend)

    torch.testing.assert_close(of(1e-4) / 1e-4, of(0), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(of(1 - 1e-4) / 1e-4, of(1), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"softcap": 3.0, "teacher_softcap": 4.0, "logit_scale": 0.5}]
)
def test_agrees_with_trl(device, beta, options):
    """In value and gradient, per token."""
    theirs = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    x, weight, teacher_x, teacher_weight, b, teacher_b = inputs = make(device)
    at = (x, weight, b)
    entropies = linear_divergence(*inputs, beta=beta, outputs=["entropy"], **options).entropy
    divergences, of_trl = theirs.apply(
        x, weight, b, teacher_x, teacher_weight, teacher_b, float(beta), options.get("temperature", 1.0),
        options.get("logit_scale", 1.0), options.get("softcap"), 1.0, options.get("teacher_softcap"),
    )  # fmt: skip
    torch.testing.assert_close(entropies, of_trl, rtol=1e-5, atol=1e-5)
    ours = linear_divergence(*inputs, beta=beta, reduction="none", **options)
    torch.testing.assert_close(ours, divergences, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(weighted([divergences]), at)
    for g, e in zip(torch.autograd.grad(weighted([ours]), at), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Chunks, products and memory
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "reduction", "dtype"), pairs(BETAS, REDUCTIONS, DTYPES), ids=str)
def test_many_chunks(device, backend, beta, reduction, dtype):
    inputs, mask = make(device, dtype), mask_of("some", device)
    assert_op_close(
        lambda *a: linear_divergence(*a, beta=beta, reduction=reduction, mask=mask, chunk_rows=2, backend=backend),
        lambda *a: linear_divergence_reference(*a, beta=beta, reduction=reduction, mask=mask),
        inputs,
        weighted,
    )


def counted(monkeypatch):
    products = Counter()
    for product in ("mm", "addmm"):
        original = getattr(torch, product)

        def call(*args, original=original, **kwargs):
            products["all"] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, product, call)
    original = torch.Tensor.__matmul__

    def matmul(a, b):
        products["all"] += 1
        return original(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    return products


@pytest.mark.parametrize(
    ("reduction", "frozen", "forward", "backward"),
    [("mean", False, 4, 0), ("sum", False, 4, 0), ("mean", True, 3, 0), ("none", False, 2, 4), ("none", True, 3, 0)],
)
def test_products(device, backend, monkeypatch, reduction, frozen, forward, backward):
    inputs = make(device, bias=False, frozen=frozen)
    products = counted(monkeypatch)
    value = linear_divergence(*inputs, beta=0.5, reduction=reduction, backend=backend)
    assert products["all"] == forward
    weighted([value]).backward()
    assert products["all"] == forward + backward


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_two_products(device, backend, monkeypatch, mode):
    inputs, products = make(device, bias=False), counted(monkeypatch)
    with mode():
        linear_divergence(*inputs, beta=0.5, backend=backend)
    assert products["all"] == 2


class Products(TorchDispatchMode):
    """Counts matrix products below every function that may compute one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("beta", "of_trl"), [(0.0, 6), (1.0, 6), (0.5, 8)])
def test_trls_function_has_more_products(beta, of_trl):
    """TRL computes the logits of both models a second time for a mixture, and once more in backward."""
    pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 and later have it")
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    def count(loss) -> int:
        x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
        with Products() as products:
            loss(x, weight, torch.randn(6, 12), torch.randn(11, 12)).backward()
        return products.count

    assert count(lambda *a: linear_divergence(*a, beta=beta, backend="torch")) == 4
    mask = torch.ones(6)
    assert count(lambda x, w, tx, tw: _chunked_divergence_loss(x, tx, w, tw, mask, beta)[0]) == of_trl


class Largest(TorchDispatchMode):
    """The largest tensor that an operator has made, in bytes."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.found = max(self.found, t.nbytes)
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_has_the_logits_of_all_tokens(device, backend, reduction):
    x, weight, teacher_x, *others = make(device)
    inputs = [x.detach().repeat(8, 1).requires_grad_(), weight, teacher_x.repeat(8, 1), *others]
    # Beside the logits of a chunk of two tokens there are weights, and their gradients.
    with Largest() as largest:
        weighted([linear_divergence(*inputs, beta=0.5, reduction=reduction, chunk_rows=2, backend=backend)]).backward()
    assert largest.found <= max(t.nbytes for t in inputs)
    assert 2 * largest.found < 4 * 8 * N * V


def test_a_chunk_is_shorter_beside_a_teachers(device, monkeypatch):
    seen = []
    original = engine.Chunks.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        seen.append((kwargs.get("beside", args[-1] if len(args) == 12 else 0), [s.stop for s in self.slices]))

    monkeypatch.setattr(engine.Chunks, "__init__", init)
    inputs = make(device, torch.bfloat16)
    linear_divergence(*inputs, beta=0.5)
    # Of the student, whose chunks make room for the teacher's; and of the teacher, which has the same ones.
    assert seen == [(2, [N]), (0, [N])]


# ---------------------------------------------------------------------------------------------------------------------
# Masks, shapes, and what backward receives
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_tokens_are_not_read(device, backend, beta, reduction):
    inputs, mask = make(device), mask_of("some", device)
    ids = torch.randint(0, V, (N,), device=device)
    expected = linear_divergence(*inputs, beta=beta, reduction=reduction, mask=mask, backend=backend)
    gradient = torch.autograd.grad(weighted([expected]), inputs[:2])
    ids[mask == 0] = -100
    for t in (inputs[0], inputs[2]):
        with torch.no_grad():
            t[mask == 0] = torch.nan
    found = linear_divergence(
        *inputs, beta=beta, reduction=reduction, mask=mask.bool(), ids=ids, outputs=("log_prob",), backend=backend
    )
    assert torch.equal(found.divergence, expected)
    assert not found.log_prob[mask == 0].any()
    again = torch.autograd.grad(weighted([found.divergence]), inputs[:2])
    assert all(map(torch.equal, again, gradient))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("beta", [0, 0.5])
def test_nothing_is_selected(device, backend, reduction, beta):
    inputs = make(device)
    value = linear_divergence(
        *inputs, beta=beta, reduction=reduction, mask=torch.zeros(N, dtype=torch.bool, device=device), backend=backend
    )
    assert not value.any()
    for g in torch.autograd.grad(value.sum(), [inputs[i] for i in (0, 1, 4)]):
        assert not g.any()


def test_shapes(device, backend):
    x, weight, teacher_x, teacher_weight, b, teacher_b = make(device)
    ids = torch.zeros(1, N, dtype=torch.int32, device=device)
    out = linear_divergence(
        x.view(1, N, H), weight, teacher_x.view(1, N, TEACHER_H), teacher_weight, b, teacher_b, beta=0.5, ids=ids,
        reduction="none", outputs=OUTPUTS, backend=backend,
    )  # fmt: skip
    assert all(t.shape == (1, N) and t.dtype == torch.float32 for t in out)
    alone = linear_divergence(
        x, weight, teacher_x, teacher_weight, b, teacher_b, beta=0.5, outputs=["entropy"], backend=backend
    )
    assert alone.divergence.shape == ()
    assert [t is None for t in alone] == [False, True, False, True, True]
    empty = linear_divergence(
        x[:0], weight, teacher_x[:0], teacher_weight, beta=0.5, ids=ids[0, :0], reduction="none", outputs=OUTPUTS,
        backend=backend,
    )  # fmt: skip
    assert all(t.shape == (0,) for t in empty)
    assert not torch.autograd.grad(empty.divergence.sum(), weight)[0].any()


@pytest.mark.parametrize("num_items", [7, 2.5, "tensor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_num_items_divides_the_sum(device, backend, num_items, dtype):
    num_items = torch.tensor(7, device=device) if num_items == "tensor" else num_items
    check(device, backend, make(device, dtype), beta=0.3, mask=mask_of("some", device), num_items=num_items)


def test_dtypes_of_each_head(device, backend):
    """A teacher in another dtype, and weights in another dtype than the hidden states."""
    x, weight, teacher_x, teacher_weight, b, teacher_b = make(device)
    # Multiples of a quarter, whose products add up to the same in any order.
    teacher = [((4 * t).round() / 4).bfloat16() for t in (teacher_x, teacher_weight, teacher_b)]
    found = linear_divergence(
        x, weight, teacher[0], teacher[1], b, teacher[2], beta=0.5, reduction="none", backend=backend
    )
    # The products of bf16 are exact in fp32; the teacher's logits are rounded.
    logits = torch.nn.functional.linear(*teacher).float()
    eye = torch.eye(V, device=device)
    expected = linear_divergence_reference(x, weight, logits, eye, b, beta=0.5, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    mixed = linear_divergence(x.bfloat16(), weight, teacher_x, teacher[1], b, teacher_b, beta=0.5, backend=backend)
    mixed.backward()
    assert weight.grad.dtype == torch.float32


def test_autocast(device, backend):
    inputs = make(device)
    with torch.autocast(device.type, torch.bfloat16):
        found = linear_divergence(*inputs, beta=0.5, reduction="none", backend=backend)
    same = [t.bfloat16() for t in inputs]
    assert torch.equal(found, linear_divergence(*same, beta=0.5, reduction="none", backend=backend))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_and_a_scaled_loss(device, backend, reduction):
    inputs = make(device)
    at = [inputs[i] for i in (0, 1, 4)]
    value = weighted([linear_divergence(*inputs, beta=0.3, reduction=reduction, backend=backend)])
    first = torch.autograd.grad(3.0 * value, at, retain_graph=True)
    second = torch.autograd.grad(value, at)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, 3.0 * b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_weights_that_are_gone_in_backward(device, reduction):
    """As a sharded model has them if nobody gathers them again."""
    inputs = make(device)
    value = linear_divergence(*inputs, beta=0.5, reduction=reduction)
    inputs[3].untyped_storage().resize_(0)
    if reduction == "mean":
        # Its gradient is formed already.
        value.backward()
    else:
        with pytest.raises(RuntimeError, match="teacher_weight is needed in backward"):
            value.sum().backward()


def test_step_in_torch_goes_by_a_few_rows(device, monkeypatch):
    monkeypatch.setattr(divergence, "_ROWS_IN_TORCH", 3)
    for beta in BETAS:
        check(device, "torch", make(device), beta=beta)
        check(device, "torch", make(device), beta=beta, reduction="none")


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

X, W = torch.zeros(N, H), torch.zeros(V, H)
BAD = [
    ({"beta": -0.1}, ValueError, r"beta must lie in \[0, 1\]; got -0.1"),
    ({"beta": 1.5}, ValueError, r"beta must lie in \[0, 1\]; got 1.5"),
    ({"beta": float("nan")}, ValueError, r"beta must lie in \[0, 1\]; got nan"),
    ({"beta": True}, ValueError, r"beta must lie in \[0, 1\]; got True"),
    ({"temperature": 0.0}, ValueError, "^temperature must be a positive finite number; got 0.0"),
    ({"teacher_temperature": -1.0}, ValueError, "^teacher_temperature must be a positive finite number; got -1.0"),
    ({"teacher_softcap": 0.0}, ValueError, "^teacher_softcap must be None or a positive finite number; got 0.0"),
    ({"teacher_logit_scale": None}, ValueError, "^teacher_logit_scale must be a finite number; got None"),
    ({"reduction": "batchmean"}, ValueError, "reduction must be one of mean, sum, none; got 'batchmean'"),
    ({"reduction": "sum", "num_items": 3}, ValueError, "num_items divides a mean"),
    ({"num_items": 0}, ValueError, "num_items must be positive and finite; got 0"),
    ({"outputs": ("argmax",)}, ValueError, "outputs must be a sequence of log_prob, entropy"),
    ({"outputs": ("teacher_log_prob",)}, ValueError, "outputs teacher_log_prob need ids; got None"),
    ({"chunk_rows": 0}, ValueError, "chunk_rows must be None or a positive int; got 0"),
    ({"ids": torch.full((N,), V), "outputs": ("log_prob",)}, ValueError, rf"ids must lie in \[0, {V}\)"),
    ({"ids": torch.zeros(N)}, TypeError, "ids must be int64 or int32; got torch.float32"),
    ({"ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "ids must have x's leading shape"),
    ({"mask": torch.ones(N)}, TypeError, "mask must be bool or an integer dtype; got torch.float32"),
    ({"mask": [True] * N}, TypeError, "mask must be a tensor; got list"),
    ({"mask": torch.ones(N + 1, dtype=torch.bool)}, ValueError, "mask must have x's leading shape"),
    ({"x": X.double()}, TypeError, "^x must be float32, bfloat16 or float16"),
    ({"teacher_x": X.double()}, TypeError, "^teacher_x must be float32, bfloat16 or float16"),
    ({"teacher_weight": W[0]}, ValueError, r"^teacher_weight must have shape \[V, H\]"),
    ({"teacher_weight": W[:, :5]}, ValueError, r"^teacher_x must have shape \[..., 5\], like teacher_weight's columns"),
    ({"teacher_x": X[:3]}, ValueError, r"^teacher_x must have x's leading shape \[11\]; got \[3\]"),
    ({"teacher_bias": torch.zeros(3)}, ValueError, rf"^teacher_bias must have shape \[{V}\]; got \[3\]"),
    ({"bias": torch.zeros(3)}, ValueError, rf"^bias must have shape \[{V}\]; got \[3\]"),
    ({"teacher_x": X.to("meta"), "teacher_weight": W.to("meta")}, ValueError, "all tensors must be on one device"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    given = {"x": X, "weight": W, "teacher_x": X, "teacher_weight": W, "beta": 0.5, **change}
    with pytest.raises(error, match=message):
        linear_divergence(**given)


def test_second_derivatives_raise(device, backend):
    x, weight, *teacher = make(device)
    for reduction in ("mean", "none"):
        value = linear_divergence(x, weight, *teacher, beta=0.5, reduction=reduction, backend=backend)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            (gradient.square().sum() + weight.sum()).backward()
