"""linear_topk_divergence against its reference and TRL: divergences, supports, gradients, products, bad input."""

import pytest
import torch

from npu_trainer_kernels.ops import linear_divergence, linear_topk_divergence, linear_topk_divergence_reference
from npu_trainer_kernels.ops.head import top_log_probs
from npu_trainer_kernels.ops.head.gradient import first_places
from tests.closeness import assert_op_close
from tests.ops.test_linear_divergence import Largest, counted, mask_of, weighted
from tests.pairs import pairs

N, H, V, K = 11, 12, 150, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BETAS = [0, 0.3, 1]
REDUCTIONS = ["mean", "sum", "none"]
MASKS = ["none", "some", "one"]
OPTIONS = [{}, {"temperature": 0.6}, {"softcap": 3.0, "temperature": 1.7}, {"logit_scale": -0.5}]
SUPPORTS = ["distinct", "duplicates", "padded", "padded with id 0 before it", "one", "all", "empty"]


def support(kind, device, dtype=torch.float32):
    """Ids and a teacher's log-probabilities of them."""
    k = {"one": 1, "all": V}.get(kind, K)
    log_q = torch.log_softmax(2.0 * torch.randn(N, V, device=device), -1)
    ids = torch.stack([torch.randperm(V, device=device)[:k] for _ in range(N)])
    # The most probable id, so that the rest is not all of the probability.
    ids[:, 0] = torch.where((ids[:, 1:] == log_q.argmax(-1, keepdim=True)).any(-1), ids[:, 0], log_q.argmax(-1))
    if kind == "all":
        ids = torch.stack([torch.randperm(V, device=device) for _ in range(N)])
    log_q = log_q.gather(-1, ids)
    if kind == "duplicates":
        ids[:, 3], ids[::2, 5] = ids[:, 0], ids[::2, 0]  # with log-probabilities that differ: the first one counts
    if kind.startswith("padded"):
        for row in range(N):
            first = row % K + 1
            ids[row, first:], log_q[row, first:] = 0, -torch.inf
    if kind.endswith("before it"):
        ids, log_q = ids.flip(-1), log_q.flip(-1)
        ids[:, -1] = 0
    if kind == "empty":
        ids[3:6], log_q[3:6] = 0, -torch.inf
    return ids, log_q.to(dtype)


def make(device, kind="distinct", dtype=torch.float32, bias=True, frozen=False):
    """x, weight, ids, teacher_log_probs, bias."""
    x = torch.randn(N, H, device=device).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, H, device=device)).to(dtype).requires_grad_(not frozen)
    b = torch.randn(V, device=device).to(dtype).requires_grad_(not frozen) if bias else None
    return [x, weight, *support(kind, device, dtype), b]


def check(device, backend, inputs, **options):
    chunk = {name: options.pop(name) for name in ("chunk_rows", "low_memory") if name in options}
    assert_op_close(
        lambda *a: linear_topk_divergence(*a, backend=backend, **options, **chunk),
        lambda *a: linear_topk_divergence_reference(*a, **options),
        inputs,
        weighted,
    )


@pytest.mark.parametrize(
    ("beta", "tail", "kind", "options", "dtype", "reduction", "mask"),
    pairs(BETAS, [True, False], SUPPORTS, OPTIONS, DTYPES, REDUCTIONS, MASKS), ids=str,
)  # fmt: skip
def test_matches_reference(device, backend, beta, tail, kind, options, dtype, reduction, mask):
    inputs = make(device, kind, dtype)
    check(device, backend, inputs, beta=beta, add_tail=tail, reduction=reduction, mask=mask_of(mask, device), **options)


@pytest.mark.parametrize(
    ("beta", "tail", "kind", "reduction"), pairs(BETAS, [True, False], SUPPORTS, REDUCTIONS), ids=str
)
def test_many_chunks_and_a_frozen_head(device, backend, beta, tail, kind, reduction):
    mask = mask_of("some", device)
    options = {"beta": beta, "add_tail": tail, "reduction": reduction, "mask": mask}
    check(device, backend, make(device, kind), chunk_rows=2, **options)
    check(device, backend, make(device, kind, bias=False, frozen=True), chunk_rows=2, **options)
    check(device, backend, make(device, kind, torch.bfloat16, bias=False), chunk_rows=3, low_memory=True, **options)


@pytest.mark.parametrize("beta", BETAS)
def test_all_ids_are_the_whole_distribution(device, backend, beta):
    """Without a tail, in value and gradient; the teacher's logits are its log-probabilities, by a head of ones."""
    x, weight, ids, log_q, b = make(device, "all")
    whole = torch.empty_like(log_q).scatter_(-1, ids, log_q)
    of_ids = linear_topk_divergence(
        x, weight, ids, log_q, b, beta=beta, add_tail=False, reduction="none", temperature=1.3, backend=backend
    )
    of_heads = linear_divergence(
        x, weight, whole, torch.eye(V, device=device), b, beta=beta, reduction="none", temperature=1.3,
        teacher_temperature=1.0, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(of_ids, of_heads, rtol=1e-5, atol=1e-6)
    found, expected = (torch.autograd.grad(weighted([each]), (x, weight, b)) for each in (of_ids, of_heads))
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


def test_one_id_with_a_tail_is_a_coin(device, backend):
    """By hand: the teacher's most probable id against all others."""
    x, weight, ids, log_q, b = make(device, "one")
    found = linear_topk_divergence(x, weight, ids, log_q, b, beta=0, reduction="none", backend=backend)
    p = torch.softmax(torch.nn.functional.linear(x, weight, b).double(), -1).gather(-1, ids).squeeze(-1)
    q = log_q.double().exp().squeeze(-1)
    expected = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    # Renormalised, one id has all of the probability.
    alone = linear_topk_divergence(x, weight, ids, log_q, b, beta=0, add_tail=False, reduction="none", backend=backend)
    assert not alone.any()


# ---------------------------------------------------------------------------------------------------------------------
# TRL
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", ["distinct", "padded", "empty", "all"])
def test_agrees_with_trls_loss_of_a_servers_log_probabilities(device, tail, kind):
    trl = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer", reason="TRL 1.16 has it")
    trainer = object.__new__(trl.IWOPDTrainer)
    trainer.loss_add_tail = tail
    x, weight, ids, log_q, b = make(device, kind)
    labels = torch.where(mask_of("some", device) == 0, -100, 1)
    logits = torch.nn.functional.linear(x, weight, b) / 1.4
    result = {"topk_logprobs": log_q.unsqueeze(0), "topk_token_ids": ids.unsqueeze(0)}
    expected = trainer._compute_server_forward_kl_loss(result, logits.log_softmax(-1).unsqueeze(0), labels.unsqueeze(0))
    found = linear_topk_divergence(
        x, weight, ids, log_q, b, beta=0, add_tail=tail, mask=labels != -100, temperature=1.4
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for g, e in zip(*(torch.autograd.grad(each, (x, weight, b)) for each in (found, expected)), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 5, V - 1])
def test_agrees_with_trls_loss_of_two_models(device, beta, tail, k):
    """The supports by `top_log_probs`: the teacher's, the student's, and both."""
    trl = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer", reason="TRL 1.16 has it")
    x, weight, _, _, b = make(device)
    teacher = [torch.randn(N, 20, device=device), 0.3 * torch.randn(V, 20, device=device)]
    logits, its = torch.nn.functional.linear(x, weight, b), torch.nn.functional.linear(*teacher)
    expected = trl.IWOPDTrainer.generalized_jsd_loss(
        logits, its, torch.zeros(N, dtype=torch.int64, device=device), beta, 0.8, "batchmean", k, tail
    )
    mine = None if beta == 0 else top_log_probs(x.detach(), weight.detach(), b.detach(), k, temperature=0.8)[0]
    ids, log_q = top_log_probs(*teacher, None, 0 if beta == 1 else k, mine, temperature=0.8)
    found = linear_topk_divergence(x, weight, ids, log_q, b, beta=beta, add_tail=tail, temperature=0.8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for g, e in zip(*(torch.autograd.grad(each, (x, weight, b)) for each in (found, expected)), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The most probable ids
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_top_log_probs(device, backend, monkeypatch, options):
    x, weight, others, _, b = make(device)
    rows = torch.tensor([8, 2, 5], device=device)
    products = counted(monkeypatch)
    ids, log_probs = top_log_probs(x, weight, b, 4, others[rows], rows=rows, backend=backend, **options)
    assert products["all"] == 1
    monkeypatch.undo()
    z = options.get("logit_scale", 1.0) * torch.nn.functional.linear(x, weight, b)
    z = z if "softcap" not in options else options["softcap"] * torch.tanh(z / options["softcap"])
    expected = torch.log_softmax(z / options.get("temperature", 1.0), -1)[rows]
    assert torch.equal(ids, torch.cat([expected.topk(4).indices, others[rows]], -1))
    torch.testing.assert_close(log_probs, expected.gather(-1, ids).detach(), rtol=1e-5, atol=1e-5)
    assert not log_probs.requires_grad
    empty, nothing = top_log_probs(x[:0], weight, b, 4, backend=backend)
    assert empty.shape == nothing.shape == (0, 4)


def test_top_log_probs_under_autocast(device, backend):
    x, weight, _, _, b = make(device)
    with torch.autocast(device.type, torch.bfloat16):
        ids, log_probs = top_log_probs(x, weight, b, 3, backend=backend)
    same = top_log_probs(x.bfloat16(), weight.bfloat16(), b.bfloat16(), 3, backend=backend)
    assert torch.equal(ids, same[0])
    assert torch.equal(log_probs, same[1])


def test_first_places():
    ids = torch.tensor([[5, 2, 5, 2, 7, 5], [1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1]])
    assert first_places(ids).tolist() == [[0, 1, 0, 1, 4, 0], [0] * 6, [0, 1, 2, 3, 4, 5]]


# ---------------------------------------------------------------------------------------------------------------------
# Products and memory
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "frozen", "forward", "backward"),
    [("mean", False, 3, 0), ("sum", False, 3, 0), ("mean", True, 2, 0), ("none", False, 1, 3), ("none", True, 1, 2)],
)
def test_products(device, backend, monkeypatch, reduction, frozen, forward, backward):
    inputs = make(device, bias=False, frozen=frozen)
    products = counted(monkeypatch)
    value = linear_topk_divergence(*inputs, beta=0.5, reduction=reduction, backend=backend)
    assert products["all"] == forward
    weighted([value]).backward()
    assert products["all"] == forward + backward


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_one_product(device, backend, monkeypatch, mode):
    inputs, products = make(device, bias=False), counted(monkeypatch)
    with mode():
        linear_topk_divergence(*inputs, beta=0.5, backend=backend)
    assert products["all"] == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_has_the_logits_of_all_tokens(device, backend, reduction):
    x, weight, ids, log_q, b = make(device)
    inputs = [x.detach().repeat(8, 1).requires_grad_(), weight, ids.repeat(8, 1), log_q.repeat(8, 1), b]
    # Beside the logits of a chunk of two tokens there are weights, their gradients, and numbers of k ids per token.
    with Largest() as largest:
        weighted(
            [linear_topk_divergence(*inputs, beta=0.5, reduction=reduction, chunk_rows=2, backend=backend)]
        ).backward()
    assert largest.found <= max(t.nbytes for t in inputs)
    assert 4 * largest.found < 4 * 8 * N * V


# ---------------------------------------------------------------------------------------------------------------------
# Masks, shapes, and what backward receives
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_tokens_are_not_read(device, backend, beta, reduction):
    inputs, mask = make(device), mask_of("some", device)
    expected = linear_topk_divergence(*inputs, beta=beta, reduction=reduction, mask=mask, backend=backend)
    gradient = torch.autograd.grad(weighted([expected]), inputs[:2])
    inputs[2][mask == 0] = -100
    for t in (inputs[0], inputs[3]):
        with torch.no_grad():
            t[mask == 0] = torch.nan
    found = linear_topk_divergence(*inputs, beta=beta, reduction=reduction, mask=mask.bool(), backend=backend)
    assert torch.equal(found, expected)
    again = torch.autograd.grad(weighted([found]), inputs[:2])
    assert all(map(torch.equal, again, gradient))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_is_selected(device, backend, reduction):
    inputs = make(device)
    none = torch.zeros(N, dtype=torch.bool, device=device)
    value = linear_topk_divergence(*inputs, beta=0.5, reduction=reduction, mask=none, backend=backend)
    assert not value.any()
    for g in torch.autograd.grad(value.sum(), [inputs[i] for i in (0, 1, 4)]):
        assert not g.any()


@pytest.mark.parametrize("tail", [True, False])
def test_an_empty_support_has_no_divergence_and_no_gradient(device, backend, tail):
    inputs = make(device, "empty")
    found = linear_topk_divergence(*inputs, beta=0.5, add_tail=tail, reduction="none", backend=backend)
    assert not found[3:6].any()
    (g,) = torch.autograd.grad(found.sum(), inputs[0])
    assert not g[3:6].any()
    assert found.isfinite().all()
    assert g.isfinite().all()


def test_a_teachers_nan_is_not_padding(device, backend):
    x, weight, ids, log_q, b = make(device)
    log_q[4, 2] = torch.nan
    found = linear_topk_divergence(x, weight, ids, log_q, b, beta=0, reduction="none", backend=backend)
    assert found.isnan().tolist() == [i == 4 for i in range(N)]


def test_shapes(device, backend):
    x, weight, ids, log_q, b = make(device)
    found = linear_topk_divergence(
        x.view(1, N, H), weight, ids.view(1, N, K).int(), log_q.view(1, N, K), b, beta=0.5, reduction="none",
        backend=backend,
    )  # fmt: skip
    assert found.shape == (1, N)
    assert found.dtype == torch.float32
    assert linear_topk_divergence(x, weight, ids, log_q, beta=0.5, backend=backend).shape == ()


@pytest.mark.parametrize("num_items", [7, 2.5, "tensor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_num_items_divides_the_sum(device, backend, num_items, dtype):
    num_items = torch.tensor(7, device=device) if num_items == "tensor" else num_items
    inputs = make(device, dtype=dtype)
    check(device, backend, inputs, beta=0.3, mask=mask_of("some", device), num_items=num_items)


def test_autocast(device, backend):
    x, weight, ids, log_q, b = make(device)
    with torch.autocast(device.type, torch.bfloat16):
        found = linear_topk_divergence(x, weight, ids, log_q, b, beta=0.5, reduction="none", backend=backend)
    same = [x.bfloat16(), weight.bfloat16(), ids, log_q, b.bfloat16()]
    assert torch.equal(found, linear_topk_divergence(*same, beta=0.5, reduction="none", backend=backend))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_and_a_scaled_loss(device, backend, reduction):
    inputs = make(device, "duplicates")
    at = [inputs[i] for i in (0, 1, 4)]
    value = weighted([linear_topk_divergence(*inputs, beta=0.3, reduction=reduction, backend=backend)])
    first = torch.autograd.grad(3.0 * value, at, retain_graph=True)
    second = torch.autograd.grad(value, at)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, 3.0 * b, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

X, W = torch.zeros(N, H), torch.zeros(V, H)
IDS, LOGS = torch.zeros(N, K, dtype=torch.int64), torch.zeros(N, K)
BAD = [
    ({"beta": -0.1}, ValueError, r"beta must lie in \[0, 1\]; got -0.1"),
    ({"beta": True}, ValueError, r"beta must lie in \[0, 1\]; got True"),
    ({"add_tail": 1}, ValueError, "add_tail must be True or False; got 1"),
    ({"temperature": 0.0}, ValueError, "^temperature must be a positive finite number; got 0.0"),
    ({"reduction": "batchmean"}, ValueError, "reduction must be one of mean, sum, none; got 'batchmean'"),
    ({"reduction": "sum", "num_items": 3}, ValueError, "num_items divides a mean"),
    ({"chunk_rows": 0}, ValueError, "chunk_rows must be None or a positive int; got 0"),
    ({"ids": IDS + V}, ValueError, rf"ids must lie in \[0, {V}\)"),
    ({"ids": IDS.float()}, TypeError, "ids must be int64 or int32; got torch.float32"),
    ({"ids": IDS[:, 0]}, ValueError, r"ids must have shape \[..., k\] with x's leading shape \[11\] and k > 0; got"),
    ({"ids": IDS[:3]}, ValueError, r"ids must have shape .* got \[3, 6\]"),
    ({"ids": IDS[:, :0], "teacher_log_probs": LOGS[:, :0]}, ValueError, r"k > 0; got \[11, 0\]"),
    ({"teacher_log_probs": LOGS[:, :2]}, ValueError, r"teacher_log_probs must have the shape of ids, \[11, 6\]; got"),
    ({"teacher_log_probs": IDS}, TypeError, "^teacher_log_probs must be float32, bfloat16 or float16"),
    ({"mask": torch.ones(N)}, TypeError, "mask must be bool or an integer dtype; got torch.float32"),
    ({"x": X.double()}, TypeError, "^x must be float32, bfloat16 or float16"),
    ({"bias": torch.zeros(3)}, ValueError, rf"^bias must have shape \[{V}\]; got \[3\]"),
    ({"teacher_log_probs": LOGS.to("meta")}, ValueError, "all tensors must be on one device"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_input(change, error, message):
    given = {"x": X, "weight": W, "ids": IDS, "teacher_log_probs": LOGS, "beta": 0.5, **change}
    with pytest.raises(error, match=message):
        linear_topk_divergence(**given)


def test_second_derivatives_raise(device, backend):
    x, weight, *others = make(device)
    for reduction in ("mean", "none"):
        value = linear_topk_divergence(x, weight, *others, beta=0.5, reduction=reduction, backend=backend)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            (gradient.square().sum() + weight.sum()).backward()
