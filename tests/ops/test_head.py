"""The head engine's modes: a plan that holds, one that holds up to a scalar, one that fails for some rows or all."""

import collections
import weakref

import pytest
import torch

from npu_trainer_kernels import backends, tiling
from npu_trainer_kernels.ops.head import chunks as chunks_module
from npu_trainer_kernels.ops.head import fused
from npu_trainer_kernels.ops.head.engine import head_statistics
from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.ops.head.objective import LogProbObjective
from npu_trainer_kernels.ops.head.reference import head_statistics_reference
from npu_trainer_kernels.ops.launch import KernelError
from tests.closeness import assert_as_close, assert_op_close, rounded_if_needed
from tests.pairs import pairs

N, H, V = 40, 16, 211
OPTIONS = HeadOptions(entropy=True)


def make(device, weight_grad=True, vocab=V):
    x = torch.randn(N, H, device=device, requires_grad=True)
    w = torch.randn(vocab, H, device=device, requires_grad=weight_grad)
    return x, w, torch.randint(0, vocab, (N,), device=device)


def upstream(log_prob, entropy):
    """A loss of the statistics, quadratic so that every row has a gradient of its own."""
    return (log_prob * log_prob).sum() - 0.3 * (entropy * entropy).sum()


def count_logits(monkeypatch) -> list[int]:
    """Notes the rows of every projection."""
    rows: list[int] = []
    original = chunks_module._project

    def project(x, *args):
        rows.append(x.shape[0])
        return original(x, *args)

    monkeypatch.setattr(chunks_module, "_project", project)
    return rows


def check(device, backend, objective, scale=1.0, mismatch=None, rows=None, weight_grad=True, chunk_rows=16):
    def op(x, w, ids):
        chosen = ids if rows is None else ids[rows]
        _, s = head_statistics(
            x, w, chosen, None, OPTIONS, rows=rows, objective=objective, backend=backend, chunk_rows=chunk_rows,
            on_mismatch=mismatch,
        )  # fmt: skip
        return s.log_prob, s.entropy

    def reference(x, w, ids):
        if rows is not None:
            x, ids = x[rows], ids[rows]
        s = head_statistics_reference(x, w, ids, None, OPTIONS)
        return s.log_prob, s.entropy

    assert_op_close(op, reference, make(device, weight_grad), lambda out: scale * upstream(out[0], out[1]))


TRANSFORMS = [{}, {"temperature": 0.6}, {"softcap": 3.0, "temperature": 1.7}, {"softcap": 2.0, "logit_scale": 0.5}]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("subset", [False, True])
def test_gradient_formed_before_its_factor_is_known(device, monkeypatch, subset, transform):
    # What CUDA gets; elsewhere it would not be reached.
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 32, 3))
    seen = count_logits(monkeypatch)
    rows = torch.arange(1, N, 3, device=device) if subset else None
    objective = LogProbObjective(lambda log_prob, chunk: (log_prob * log_prob).sum())
    options = HeadOptions(entropy=True, **transform)

    def op(x, w, ids):
        _, s = head_statistics(x, w, ids if rows is None else ids[rows], None, options, rows=rows, objective=objective,
                               backend="triton", chunk_rows=16)  # fmt: skip
        return s.log_prob, s.entropy

    def reference(x, w, ids):
        x, ids = (x, ids) if rows is None else (x[rows], ids[rows])
        s = head_statistics_reference(x, w, ids, None, options)
        return s.log_prob, s.entropy

    assert_op_close(op, reference, make(device), lambda out: 3.0 * (out[0] * out[0]).sum())
    assert seen == ([13] if subset else [16, 16, 8])


def weight_error(device, dtype, backend, planned, chunks) -> float:
    """The relative error of the weight's gradient over so many chunks (None: as tiling says), against fp64."""
    n, hidden, vocab = 64, 24, 96
    torch.manual_seed(0)
    # Small logits, and rows that have much in common: rounding of a sum is what counts.
    x = (1 + 0.5 * torch.randn(n, hidden, device=device)).to(dtype)
    w = (0.05 * torch.randn(vocab, hidden, device=device)).to(dtype)
    ids, given = torch.randint(0, vocab, (n,), device=device), torch.rand(n, device=device) + 0.5
    x.requires_grad_(), w.requires_grad_()
    objective = LogProbObjective(lambda log_prob, chunk: (log_prob * given[chunk]).sum()) if planned else None
    _, s = head_statistics(x, w, ids, None, HeadOptions(), objective=objective, backend=backend,
                           chunk_rows=chunks and n // chunks)  # fmt: skip
    (found,) = torch.autograd.grad(s.log_prob, w, given)
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    exact = head_statistics_reference(x, w, ids, None, HeadOptions()).log_prob
    (truth,) = torch.autograd.grad(exact, w, given.double())
    return ((found - truth).norm() / truth.norm()).item()


SUMS = [
    ("planned", "torch", torch.bfloat16),
    ("planned", "torch", torch.float16),
    ("recompute", "torch", torch.bfloat16),
    ("recompute", "torch", torch.float16),
    ("planned", "triton", torch.bfloat16),
    ("in one kernel", "triton", torch.bfloat16),
    ("in borrowed memory", "triton", torch.bfloat16),
]


@pytest.mark.parametrize(("mode", "backend", "dtype"), SUMS, ids=str)
def test_many_chunks_are_as_exact_as_one(device, monkeypatch, mode, backend, dtype):
    """Their sum is in fp32. In 16 bits it would lose a bit for every four chunks, and no comparison of one call with
    the truth would notice: each product by itself is as good as ever."""
    if mode in ("in one kernel", "in borrowed memory"):
        monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 32, 4))
    planned = mode != "recompute"
    one = weight_error(device, dtype, backend, planned, 1)
    if mode == "in borrowed memory":
        stops = tuple(range(2, 65, 2))
        monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: tiling.BorrowingChunks(stops, 24))
    many = weight_error(device, dtype, backend, planned, None if mode == "in borrowed memory" else 32)
    assert many <= 1.2 * one


@pytest.mark.parametrize("borrowed", [False, True])
def test_what_rows_of_logits_are_padded_with_is_a_number(device, monkeypatch, borrowed):
    """Some products read on to the end of a row, times zero, and memory that nobody has written to may hold NaN."""
    padding, project = [], chunks_module._project

    def kept(x, weight, bias, out):
        width, stride = out.shape[1], out.stride(0)
        behind = out.as_strided((len(out), stride - width), out.stride(), out.storage_offset() + width)
        padding.append(behind.clone())
        return project(x, weight, bias, out)

    def empty(*size, **options):
        return torch.full(size, float("nan"), **options)

    if borrowed:
        monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: tiling.BorrowingChunks((N // 2, N), 120))
    monkeypatch.setattr(chunks_module, "_project", kept)
    monkeypatch.setattr(chunks_module.torch, "empty", empty)
    objective = LogProbObjective(lambda log_prob, chunk: (log_prob * log_prob).sum())
    x, w, ids = (
        t.detach().bfloat16().requires_grad_() if t.is_floating_point() else t for t in make(device, vocab=499)
    )
    head_statistics(
        x, w, ids, None, OPTIONS, objective=objective, backend="triton", chunk_rows=None if borrowed else 16
    )
    assert sum(part.numel() for part in padding) >= 5 * N
    assert all(part.eq(0).all() for part in padding)


@pytest.mark.parametrize(
    ("subset", "dtype", "one"), pairs([False, True], [torch.float32, torch.bfloat16], [True, False]), ids=str
)
def test_first_chunk_lies_where_the_gradient_will(device, monkeypatch, subset, dtype, one):
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 32, 3))
    n = 13 if subset else N
    stops = (n,) if one else (n // 2, n)
    # 40 rows of 120 columns fit (499 - 120) x 16 numbers, and 40 x 16 sums fit 120 x 16 numbers of two bytes.
    monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: tiling.BorrowingChunks(stops, 120))
    rows = torch.arange(1, N, 3, device=device) if subset else None
    objective = LogProbObjective(lambda log_prob, chunk: (log_prob * log_prob).sum())

    def op(x, w, ids):
        _, s = head_statistics(x, w, ids if rows is None else ids[rows], None, OPTIONS, rows=rows, objective=objective,
                               backend="triton")  # fmt: skip
        return s.log_prob, s.entropy

    def reference(x, w, ids):
        x, ids = (x, ids) if rows is None else (x[rows], ids[rows])
        s = head_statistics_reference(x, w, ids, None, OPTIONS)
        return s.log_prob, s.entropy

    inputs = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in make(device, vocab=499)]
    assert_op_close(op, reference, inputs, lambda out: 3.0 * (out[0] * out[0]).sum())


@pytest.mark.parametrize("second", [False, True])
def test_a_failing_kernel_hands_its_columns_to_torch(device, monkeypatch, second):
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 32, 3))
    if second:
        # 40 x 48 numbers of logits, 40 x 16 of dx.
        monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: tiling.BorrowingChunks((N,), 48))

    def fail(*args, **kwargs):
        raise KernelError("planted")

    monkeypatch.setenv("NPU_KERNELS_STRICT", "0")
    monkeypatch.setattr(fused, "launch", fail)
    objective = LogProbObjective(lambda log_prob, chunk: (log_prob * log_prob).sum())

    def op(x, w, ids):
        backends.forget_failures()
        with pytest.warns(RuntimeWarning, match="planted"):
            _, s = head_statistics(x, w, ids, None, OPTIONS, objective=objective, backend="triton")
        return s.log_prob

    def reference(x, w, ids):
        return head_statistics_reference(x, w, ids, None, OPTIONS).log_prob

    try:
        assert_op_close(op, reference, make(device), lambda out: (out[0] * out[0]).sum())
    finally:
        backends.forget_failures()


def test_what_an_objective_has_closed_over_is_let_go(device, backend):
    """Backward does not need it, and the graph lives as long as the loss."""
    large = torch.ones(N, device=device)
    gone = weakref.ref(large)
    x, w, ids = make(device)

    def objective(s, chunk, large=large):
        return (s.log_prob * large[chunk]).sum()

    total, _ = head_statistics(x, w, ids, None, OPTIONS, objective=objective, backend=backend)
    del objective, large
    assert gone() is None
    total.backward()
    assert x.grad.any()


@pytest.mark.parametrize("scale", [1.0, -0.125, 65536.0])
def test_a_plan_that_holds_up_to_a_scalar_is_used(device, backend, monkeypatch, scale):
    rows, seen = count_logits(monkeypatch), []
    check(device, backend, lambda s, chunk: upstream(s.log_prob, s.entropy), scale, seen.append)
    assert rows == [16, 16, 8]
    assert seen == []


@pytest.mark.parametrize("chunk_rows", [None, 7, (5, 30, N)])
def test_chunks_of_any_size(device, backend, chunk_rows):
    check(device, backend, lambda s, chunk: upstream(s.log_prob, s.entropy), chunk_rows=chunk_rows)


def test_rows_where_the_plan_fails_are_formed_again(device, backend, monkeypatch):
    rows, seen = count_logits(monkeypatch), []

    def partly_wrong(s, chunk):
        weight = torch.ones_like(s.log_prob)
        if chunk.start == 0:
            weight[3:6] = 0.5
        return upstream(s.log_prob * weight, s.entropy)

    check(device, backend, partly_wrong, mismatch=seen.append)
    assert rows == [16, 16, 8, 3]
    assert seen == [3 / N]


def test_a_wrong_plan_costs_time_not_correctness(device, backend, monkeypatch):
    rows, seen = count_logits(monkeypatch), []
    check(device, backend, lambda s, chunk: s.log_prob.sum(), mismatch=seen.append)
    assert rows == [16, 16, 8, 16, 16, 8]
    assert len(seen) == 1
    assert seen[0] > 0.5


def test_a_plan_of_zeros_against_real_gradients(device, backend):
    check(device, backend, lambda s, chunk: 0.0 * s.log_prob.sum())


@pytest.mark.parametrize("weight_grad", [True, False])
def test_rows_left_out_get_no_gradient(device, backend, weight_grad):
    rows = torch.arange(1, N, 3, device=device)
    check(device, backend, None, rows=rows, weight_grad=weight_grad)


def test_frozen_head_needs_no_second_projection(device, backend, monkeypatch):
    rows = count_logits(monkeypatch)
    x, w, ids = make(device, weight_grad=False)

    def op(x, w, ids):
        return head_statistics(x, w, ids, None, HeadOptions(), backend=backend, chunk_rows=16)[1].log_prob

    assert_op_close(
        op,
        lambda *a: head_statistics_reference(*a, None, HeadOptions()).log_prob,
        [x, w, ids],
        lambda out: (out[0] * out[0]).sum(),
    )
    assert rows == [16, 16, 8]


def test_frozen_head_with_an_entropy_gradient(device, backend):
    check(device, backend, None, weight_grad=False)


@pytest.mark.parametrize("weight_grad", [True, False])
def test_a_plan_for_no_rows(device, backend, weight_grad):
    x, w, _ = make(device, weight_grad)
    nothing = torch.empty(0, dtype=torch.long, device=device)
    _, s = head_statistics(
        x, w, nothing, None, OPTIONS, rows=nothing, objective=lambda s, c: s.log_prob.sum(), backend=backend
    )
    assert not torch.autograd.grad(s.log_prob.sum() + s.entropy.sum(), x)[0].any()


def test_nan_in_the_real_gradient_is_no_match(device, backend):
    x, w, ids = make(device)
    _, s = head_statistics(x, w, ids, None, OPTIONS, objective=lambda s, c: s.log_prob.sum(), backend=backend)
    upstream = torch.ones(N, device=device)
    upstream[4] = torch.nan
    grad = torch.autograd.grad(s.log_prob, x, upstream)[0]
    assert grad[4].isnan().all()
    assert grad[:4].isfinite().all()


@pytest.mark.parametrize("planned", [lambda log_prob: log_prob.sum(), lambda log_prob: (log_prob * log_prob).sum()])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_gradient_that_is_not_finite_is_no_reason_to_plan_no_more(device, backend, planned, value, everywhere):
    seen = []
    x, w, ids = make(device)
    objective = LogProbObjective(lambda log_prob, chunk: planned(log_prob))
    _, s = head_statistics(
        x, w, ids, None, OPTIONS, objective=objective, on_mismatch=seen.append, backend=backend, chunk_rows=16
    )
    given = torch.linspace(1, 2, N, device=device)
    given[slice(None) if everywhere else slice(4, 5)] = value
    grad = torch.autograd.grad(s.log_prob, x, given)[0]
    assert seen == []
    assert not grad[4].isfinite().all()
    assert grad[:4].isfinite().all() != everywhere


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ways", [1, 2], ids=["log_prob", "log_prob and entropy"])
def test_a_plan_holds_where_what_arrives_is_rounded(device, backend, dtype, ways):
    """As FSDP2 rounds what leaves a model. The gradient is that of the numbers before they were rounded."""
    seen = []
    x, w, ids = make(device)
    weights = torch.linspace(0.3, 1.7, N, device=device)

    def objective(s, chunk):
        rows = weights[chunk]
        return (s.log_prob * rows).sum() + (ways - 1) * (s.entropy * rows).sum()

    _, s = head_statistics(
        x, w, ids, None, OPTIONS, objective=objective, on_mismatch=seen.append, backend=backend, chunk_rows=16
    )
    rounded = weights.to(dtype).float()
    assert not torch.equal(rounded, weights)
    found = torch.autograd.grad([s.log_prob, s.entropy][:ways], [x, w], [rounded] * ways)
    assert seen == []

    def by_reference(kind):
        inputs = [t.detach().to(kind).requires_grad_() for t in (x, w)]
        r = head_statistics_reference(*inputs, ids, None, OPTIONS)
        return torch.autograd.grad([r.log_prob, r.entropy][:ways], inputs, [weights.to(kind)] * ways)

    expected, exact = by_reference(torch.float32), by_reference(torch.float64)
    moved = rounded_if_needed(lambda: by_reference(torch.float32))
    for i, (ours, same, truth) in enumerate(zip(found, expected, exact, strict=True)):
        assert_as_close(ours, same, truth, "gradient", moved(i))


# Of log_prob and entropy, and whether the head is trained: what backward makes of each.
BACKWARDS = {
    "plan holds": (lambda s, c: s.log_prob.sum(), lambda s: 2.0 * s.log_prob.sum(), True),
    "plan fails for some rows": (lambda s, c: s.log_prob.sum(), lambda s: s.log_prob[3:].sum(), True),
    "plan fails": (lambda s, c: s.log_prob.sum(), lambda s: upstream(s.log_prob, s.entropy), True),
    "no plan": (None, lambda s: s.log_prob.sum(), True),
    "frozen": (None, lambda s: (s.log_prob * s.log_prob).sum(), False),
    "frozen, with an entropy": (None, lambda s: s.entropy.sum(), False),
}


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("name", BACKWARDS)
def test_what_backward_reads_it_reads_once(device, backend, name, subset):
    """Hooks that keep it on the host bring it back at every reading; a checkpoint refuses the second one."""
    objective, loss, trained = BACKWARDS[name]
    x, w, ids = make(device, trained)
    rows = torch.arange(1, N, 3, device=device) if subset else None
    kept, read = [], collections.Counter()

    def pack(t):
        kept.append(t)
        return len(kept) - 1

    def unpack(key):
        read[key] += 1
        return kept[key]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _, s = head_statistics(x, w, ids if rows is None else ids[rows], None, OPTIONS, rows=rows,
                               objective=objective, backend=backend)  # fmt: skip
    loss(s).backward()
    assert x.grad.any()
    assert set(read.values()) == {1}


def test_a_failed_plan_makes_room_for_what_takes_its_place(device, backend, monkeypatch):
    """Its gradients, one of the size of the weight, are gone when those of the real ones are begun."""
    begun, original = [], chunks_module.Gradients.empty

    def empty(*args):
        alive = [ref() is not None for ref in planned]
        made = original(*args)
        begun.append(alive)
        return made

    def cast(self, *args):
        made = original_cast(self, *args)
        planned.extend(weakref.ref(t) for t in (made.x, made.weight))
        return made

    planned, original_cast = [], chunks_module.Gradients.cast
    monkeypatch.setattr(chunks_module.Gradients, "empty", empty)
    monkeypatch.setattr(chunks_module.Gradients, "cast", cast)
    x, w, ids = make(device)
    _, s = head_statistics(x, w, ids, None, OPTIONS, objective=lambda s, c: s.log_prob.sum(), backend=backend)
    assert [ref() is not None for ref in planned] == [True, True]
    upstream(s.log_prob, s.entropy).backward()
    assert begun == [[], [False, False]]


@pytest.mark.parametrize("taken", ["partitioned", "freed"])
def test_a_weight_that_is_gone_in_backward_is_an_error(taken):
    """What DeepSpeed's ZeRO-3 and FSDP2 do to a weight whose gathering they do not see used."""
    x, w, ids = make(torch.device("cpu"))
    _, s = head_statistics(x, w, ids, None, OPTIONS, backend="torch")
    if taken == "partitioned":
        w.data = torch.empty(0)
    else:
        w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"weight is needed in backward.* in forward it was \[211, 16\]"):
        s.log_prob.sum().backward()
