"""The head of a vocabulary that ranks share out: its ops beside their references on the whole vocabulary, on ranks that
are there already. What is wrong raises. Then the faults that would be easy to make, each planted in a case that has to
see it. `tensor_parallel.py` runs it.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ops import (
    GrpoOptions,
    fused_linear_cross_entropy,
    fused_linear_grpo_loss,
    linear_cross_entropy_reference,
    linear_divergence,
    linear_divergence_reference,
    linear_logprob,
    linear_logprob_reference,
)
from npu_trainer_kernels.ops.head import engine
from npu_trainer_kernels.ops.head.engine import _Call
from npu_trainer_kernels.ops.head.grpo_loss import fused_linear_grpo_loss_reference
from npu_trainer_kernels.ops.head.linear_logprob import OUTPUTS
from npu_trainer_kernels.ops.head.vocabulary_slices import VocabSlice
from tests.closeness import assert_as_close, rounded_if_needed, run
from tests.distributed.ranks import by_rank

__all__ = ["Said", "checked"]

ROWS, HIDDEN, VOCAB = 41, 24, 101
FIRST = 51  # ids of the first rank; the other has one less
CHUNK = 16
Case = tuple[Callable[..., Any], Callable[..., Any]]


class Said(TorchDispatchMode):
    """What this rank says to the others, with how many numbers, and the multiplications of its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._opname
        if function.namespace == "c10d":
            # A gathering one has what it writes to first, and what it is given second.
            given = args[1] if "gather" in name else args[0]
            self.calls.append((name.strip("_"), sum(t.numel() for t in given)))
        elif function.namespace == "_c10d_functional" and "wait" not in name:
            self.calls.append((name.replace("_", "").removesuffix("intotensor"), args[0].numel()))
        elif name in ("mm", "addmm", "addmm_"):
            first, second = args[-2:]
            self.products += first.numel() * second.shape[1]
        return function(*args, **(kwargs or {}))


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def mine() -> slice:
    """This rank's rows of the weight."""
    return slice(0, FIRST) if mesh().get_local_rank() == 0 else slice(FIRST, VOCAB)


# ---------------------------------------------------------------------------------------------------------------------
# Ops
# ---------------------------------------------------------------------------------------------------------------------


def inputs(ids: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    low, high = {"mixed": (0, VOCAB), "first": (0, FIRST), "last": (FIRST, VOCAB), "ignored": (0, VOCAB)}[ids]
    target = torch.randint(low, high, (ROWS,), generator=drawn)
    target[::7] = -100
    found = {
        "x": torch.randn(ROWS, HIDDEN, generator=drawn),
        "weight": 0.4 * torch.randn(VOCAB, HIDDEN, generator=drawn),
        "bias": 0.1 * torch.randn(VOCAB, generator=drawn),
    }
    # Greatest where nobody looks for it: on the first rank's slice in some rows, on the other's in the rest.
    found["x"][: ROWS // 2] *= 4
    found = {name: t.to(dtype).requires_grad_() for name, t in found.items()}
    found["target"] = torch.full_like(target, -100) if ids == "ignored" else target
    found["class_weights"] = torch.rand(VOCAB, generator=drawn) + 0.5
    return found


def part(result: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a result on the whole vocabulary."""
    return result if result is None or result.shape[:1] != (VOCAB,) else result[mine()]


def shared(t: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's rows of a head's parameter, as the DTensor that the head has."""
    if t is None:
        return None
    shape = (VOCAB, *t.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, mesh(), [Shard(0)], run_check=False, shape=shape, stride=stride)


def weighted(outputs: Any) -> torch.Tensor:
    """A scalar of all outputs, in which no row counts as another does."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(outputs):
        if out is not None and out.is_floating_point() and out.requires_grad:
            of_each = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape) / out.numel()
            total = total + (out.double() * (of_each + i)).sum()
    return total


def agree(op: Callable[..., Any], reference: Callable[..., Any], ids: str, dtype: torch.dtype, biased: bool = True,
          frozen: bool = False, dead: bool = False) -> None:  # fmt: skip
    """Raises unless the op on this rank's rows does what the reference does on all: values, the gradient of x, and its
    rows of the weight's and the bias's. `dead`: the other rank has ids that nobody may choose, and no others."""
    given = inputs(ids, dtype)
    if dead:
        with torch.no_grad():
            given["bias"][FIRST:] = -torch.inf
    if not biased:
        given["bias"] = None  # type: ignore[assignment]
    if frozen:
        given["weight"].requires_grad_(False)
    slices = {name: given[name] if given[name] is None else given[name].detach()[mine()].requires_grad_(
        given[name].requires_grad) for name in ("weight", "bias")}  # fmt: skip

    def sliced(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return op(x, shared(weight), shared(bias), *rest)

    actual = run(sliced, [*{**given, **slices}.values()], weighted)
    same = run(reference, [*given.values()], weighted)
    truth = run(reference, [*given.values()], weighted, torch.float64)
    # The reference says nothing to the other rank, which need not compute it again, too.
    moved = rounded_if_needed(lambda: [*map(part, run(reference, [*given.values()], weighted))])
    for i, (a, r, t) in enumerate(zip(actual, map(part, same), map(part, truth), strict=True)):
        assert (a is None) == (r is None), i
        if a is None or r is None or t is None:
            continue
        assert_as_close(a, r, t, f"result {i}, {ids} ids", moved(i))


def cross_entropy(backend: str | None, **options: Any) -> Case:
    def op(x: Any, weight: Any, bias: Any, target: Any, k: Any) -> Any:
        return fused_linear_cross_entropy(
            x, weight, target, bias, backend=backend, class_weights=k if weigh else None, **options
        )

    def reference(x: Any, weight: Any, bias: Any, target: Any, k: Any) -> Any:
        return linear_cross_entropy_reference(x, weight, target, bias, class_weights=k if weigh else None, **options)

    weigh = options.pop("weigh", False)
    return op, reference


def log_probabilities(backend: str | None, outputs: Any = OUTPUTS, **options: Any) -> Case:
    def op(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        return linear_logprob(x, weight, target.clamp(min=0), bias, outputs=outputs, backend=backend, **options)

    def reference(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        return linear_logprob_reference(x, weight, target.clamp(min=0), bias, outputs=outputs, **options)

    return op, reference


def grpo(backend: str | None) -> Case:
    """Planned: the gradient is formed while a chunk's logits are alive; with an entropy bonus."""
    options = GrpoOptions(loss_type="dapo", beta=0.1, entropy_coef=0.05)
    drawn = torch.Generator().manual_seed(4)
    advantages, old = torch.randn(ROWS, generator=drawn), -4 - torch.rand(ROWS, 1, generator=drawn)
    given = {"options": options, "old_log_prob": old, "ref_log_prob": old - 0.1}

    def op(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        ids, keep = target.clamp(min=0).unsqueeze(1), (target >= 0).unsqueeze(1)
        out = fused_linear_grpo_loss(
            x.unsqueeze(1), weight, ids, advantages, bias, completion_mask=keep, backend=backend, **given
        )
        return out.loss, out.log_prob, out.entropy

    def reference(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        ids, keep = target.clamp(min=0).unsqueeze(1), (target >= 0).unsqueeze(1)
        out = fused_linear_grpo_loss_reference(
            x.unsqueeze(1), weight, ids, advantages, bias, completion_mask=keep, **given
        )
        return out.loss, out.log_prob, out.entropy

    return op, reference


BOTH = ("log_prob", "entropy", "teacher_log_prob", "teacher_entropy")


def divergence(backend: str | None, beta: float, whole: bool = False, outputs: Any = BOTH, taught: bool = True,
               **options: Any) -> Case:  # fmt: skip
    """Of two heads; `whole`: each rank has all of the teacher's rows."""
    drawn = torch.Generator().manual_seed(5)
    teacher = {"x": torch.randn(ROWS, 8, generator=drawn), "weight": 0.6 * torch.randn(VOCAB, 8, generator=drawn),
               "bias": 0.1 * torch.randn(VOCAB, generator=drawn)}  # fmt: skip
    if not taught:
        teacher.pop("bias")

    def values(out: Any) -> Any:
        return out if outputs else (out,)

    def of_teacher(like: torch.Tensor) -> list[torch.Tensor]:
        return [t.to(like.dtype) for t in teacher.values()]

    def arguments(target: torch.Tensor) -> dict[str, Any]:
        return {"mask": target >= 0, "ids": target.clamp(min=0) if outputs else None, "outputs": outputs, "beta": beta,
                "teacher_temperature": 0.8, **options}  # fmt: skip

    def op(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        its_x, *its = of_teacher(x)
        its_weight, its_bias, *_ = *(its if whole else (shared(t[mine()]) for t in its)), None
        return values(linear_divergence(
            x, weight, its_x, its_weight, bias, its_bias, backend=backend, **arguments(target)
        ))  # fmt: skip

    def reference(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        its_x, its_weight, its_bias, *_ = *of_teacher(x), None
        return values(linear_divergence_reference(
            x, weight, its_x, its_weight, bias, its_bias, **arguments(target)
        ))  # fmt: skip

    return op, reference


SMOOTH = {"label_smoothing": 0.1, "weigh": True, "softcap": 6.0, "logit_scale": 0.7, "z_loss": 1e-2, "reduction": "sum"}


def ops() -> None:
    """Every op, in each dtype, with ids where they are hardest."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for ids in ("mixed", "first", "last"):
            agree(*cross_entropy(None), ids, dtype)
        agree(*cross_entropy(None, **SMOOTH), "mixed", dtype)
        agree(*cross_entropy(None, reduction="none"), "last", dtype, biased=False)
        agree(*log_probabilities(None, temperature=0.7), "mixed", dtype)
        agree(*grpo(None), "mixed", dtype)
    agree(*cross_entropy(None), "ignored", torch.float32)
    agree(*cross_entropy(None), "first", torch.float32, dead=True)
    agree(*cross_entropy(None, label_smoothing=0.1), "first", torch.float32)
    agree(*log_probabilities(None, ("entropy",)), "first", torch.float32)
    agree(*log_probabilities(None, ()), "mixed", torch.float32, biased=False, frozen=True)
    for case in (cross_entropy("triton", **SMOOTH), log_probabilities("triton"), grpo("triton")):
        agree(*case, "mixed", torch.float32)


def divergences() -> None:
    """Of two heads: planned, planned with gradients of other statistics, computed again, and with a frozen head."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for beta in (0.0, 0.3, 1.0):
            agree(*divergence(None, beta, temperature=0.7), "mixed", dtype)
            agree(*divergence(None, beta, outputs=()), "mixed", dtype, biased=False)
    for beta in (0.0, 0.3, 1.0):
        agree(*divergence(None, beta, whole=True, softcap=6.0), "first", torch.float32)
        agree(*divergence(None, beta, outputs=(), reduction="none", logit_scale=0.7), "last", torch.float32)
        agree(*divergence(None, beta, outputs=(), reduction="none"), "mixed", torch.float32, biased=False, frozen=True)
        agree(*divergence("triton", beta), "mixed", torch.float32)
    agree(*divergence(None, 0.3, whole=True, outputs=(), taught=False), "mixed", torch.float32)
    agree(*divergence(None, 0.3, num_items=5), "ignored", torch.float32)


def predictions() -> None:
    """What is no gradient: the greatest logit, wherever it is."""
    given = inputs("mixed", torch.float32)
    with torch.no_grad():
        out: Any = fused_linear_cross_entropy(
            given["x"], shared(given["weight"][mine()]), given["target"], shared(given["bias"][mine()]),
            outputs=("token_accuracy", "predicted_ids"),
        )  # fmt: skip
        expected = torch.nn.functional.linear(given["x"], given["weight"], given["bias"]).argmax(-1)
    valid = given["target"] != -100
    assert torch.equal(out.predicted_ids, expected.masked_fill(~valid, -100))
    assert out.predicted_ids.max() >= FIRST > out.predicted_ids[valid].min()
    right = (expected == given["target"])[valid].float().mean()
    torch.testing.assert_close(out.token_accuracy, right)


def nothing_else_is_said(dtype: torch.dtype) -> None:
    """For a loss and its gradients: a maximum, a sum and a logit of each row, and once the gradient of x. No product is
    formed twice, and none of another rank's columns."""
    given = inputs("mixed", dtype)
    weight = shared(given["weight"].detach()[mine()].requires_grad_())
    with Said() as said:
        loss = fused_linear_cross_entropy(given["x"], weight, given["target"])
        loss.backward()  # type: ignore[union-attr]
    rows, columns = int((given["target"] != -100).sum()), mine().stop - mine().start
    chunks = [min(CHUNK, rows - start) for start in range(0, rows, CHUNK)]
    assert said.calls == [*(("allgather", 3 * n) for n in chunks), ("allreduce", ROWS * HIDDEN)]
    assert said.products == 3 * rows * HIDDEN * columns
    # Of two heads: these numbers of both, and two sums of each row.
    op, _ = divergence(None, 0.3, outputs=(), taught=False)
    with Said() as said:
        op(given["x"], weight, None, given["target"], None)[0].backward()
    each = [[("allgather", 3 * n), ("allgather", 3 * n), ("allreduce", 2 * n)] for n in chunks]
    assert said.calls == [*itertools.chain(*each), ("allreduce", ROWS * HIDDEN)]
    assert said.products == rows * (3 * HIDDEN + 8) * columns


def refused() -> None:
    """What cannot be served says so before anything is exchanged; nothing is formed of it."""
    given = inputs("mixed", torch.float32)
    x, target, k = given["x"].detach(), given["target"].clamp(min=0), given["class_weights"]
    weight, bias = given["weight"].detach(), given["bias"].detach()
    ours = shared(weight[mine()])

    def every(t: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(t, mesh(), [Replicate()], run_check=False)

    reversed_mesh = DeviceMesh("cpu", [1, 0])
    plain = "must be a plain tensor, the same on all ranks; got a DTensor"
    cases: list[tuple[str, Callable[[], Any]]] = [
        (f"x {plain}", lambda: fused_linear_cross_entropy(every(x), ours, target)),
        (f"target {plain}", lambda: fused_linear_cross_entropy(x, ours, every(target))),
        (f"ids {plain}", lambda: linear_logprob(x, ours, every(target))),
        (f"class_weights {plain}", lambda: fused_linear_cross_entropy(x, ours, target, class_weights=every(k))),
        ("must be sharded by rows", lambda: fused_linear_cross_entropy(x, every(weight), target)),
        ("bias is not placed as weight is", lambda: fused_linear_cross_entropy(x, ours, target, bias)),
        ("bias must be a plain tensor", lambda: fused_linear_cross_entropy(x, weight, target, shared(bias[mine()]))),
        ("ranks have none of the weight's 1 rows", lambda: fused_linear_cross_entropy(
            x, distribute_tensor(weight[:1], mesh(), [Shard(0)]), target * 0)),
        ("teacher_weight must be a plain tensor where weight is one", lambda: linear_divergence(
            x, weight, x, ours, beta=0.5)),
        ("teacher_weight must have the rows of a weight that ranks share, 101; got 100", lambda: linear_divergence(
            x, ours, x, weight[1:], beta=0.5)),
        ("teacher_weight must be on the mesh of weight", lambda: linear_divergence(
            x, ours, x, DTensor.from_local(weight[mine()], reversed_mesh, [Shard(0)], run_check=False,
                                           shape=weight.shape, stride=weight.stride()), beta=0.5)),
        ("must be sharded by rows", lambda: linear_divergence(x, ours, x, every(weight), beta=0.5)),
        ("teacher_bias must be a plain tensor where teacher_weight is one", lambda: linear_divergence(
            x, ours, x, weight, None, shared(bias[mine()]), beta=0.5)),
        (f"teacher_x {plain}", lambda: linear_divergence(x, ours, every(x), ours, beta=0.5)),
    ]  # fmt: skip
    for expected, call in cases:
        with pytest.raises(ValueError, match=re.escape(expected)):
            call()


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------

own, merged, total = VocabSlice.own, VocabSlice.merged, VocabSlice.total
both = engine.divergence_and_gradient


def counts_every_id(self: Any, ids: Any) -> Any:
    return own(self, ids)[0], torch.ones_like(ids, dtype=torch.bool)


def greatest_not_merged(self: Any, given: Any) -> Any:
    found = merged(self, given._replace(row_max=torch.zeros_like(given.row_max)))
    return found._replace(row_max=given.row_max)


def sums_not_brought_together(self: Any, given: Any) -> Any:
    found = merged(self, given._replace(row_max=torch.zeros_like(given.row_max)))
    return found._replace(row_max=merged(self, given).row_max)


def keeps(name: str) -> Callable[..., Any]:
    """One of the numbers stays this rank's."""

    def fault(self: Any, given: Any) -> Any:
        return merged(self, given)._replace(**{name: getattr(given, name)})

    return fault


def of_the_first_columns(self: Any, values: Any) -> Any:
    return values[: self.width]


def written_at_once(*args: Any) -> Any:
    """The gradient of a divergence with the P of a slice."""
    *given, p_sum, d, options, teacher, backend, part = args
    if part is not None and p_sum is not None and d is not None:
        p_sum = 0.5 * p_sum
    return both(*given, p_sum, d, options, teacher, backend, part)


def id_of_another_rank(*args: Any) -> Any:
    with mock.patch.object(VocabSlice, "own", counts_every_id):
        return both(*args)


def not_added_up(*args: Any) -> Any:
    with mock.patch.object(VocabSlice, "total", lambda self, parts: parts):
        return both(*args)


def uniform_over_a_slice(self: Any, weight: Any, class_weights: Any) -> Any:
    return None if class_weights is not None else 1.0 / weight.shape[0]


EVERYTHING = functools.partial(agree, *log_probabilities(None), "mixed", torch.float32)
LOSS = functools.partial(agree, *cross_entropy(None), "mixed", torch.float32)
DIVERGENCE = functools.partial(agree, *divergence(None, 0.3), "mixed", torch.float32)
FAULTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "an id of another rank counts": (VocabSlice, "own", counts_every_id, LOSS),
    "the greatest is not merged": (VocabSlice, "merged", greatest_not_merged, LOSS),
    "sums have their own maximum": (VocabSlice, "merged", sums_not_brought_together, LOSS),
    "the sum is not merged": (VocabSlice, "merged", keeps("s"), LOSS),
    "entropy is not merged": (VocabSlice, "merged", keeps("d"), EVERYTHING),
    "the mean is not merged": (VocabSlice, "merged", keeps("u"), EVERYTHING),
    "squares are not merged": (VocabSlice, "merged", keeps("q"), EVERYTHING),
    "the argmax is a column": (VocabSlice, "merged", keeps("best"), predictions),
    "the logit of the id is not merged": (VocabSlice, "merged", keeps("z_id"), LOSS),
    "dx is not added up": (VocabSlice, "total", lambda self, d: d, LOSS),
    "dx is added up twice": (VocabSlice, "total", lambda self, d: total(self, total(self, d)), LOSS),
    "class weights of other ids": (VocabSlice, "of_columns", of_the_first_columns, functools.partial(
        agree, *cross_entropy(None, weigh=True, label_smoothing=0.1), "mixed", torch.float32)),
    "a divergence is not added up": (engine, "divergence_and_gradient", not_added_up, DIVERGENCE),
    "a divergence's gradient with a part of P": (engine, "divergence_and_gradient", written_at_once, DIVERGENCE),
    "an id of another rank counts in a divergence": (
        engine, "divergence_and_gradient", id_of_another_rank, DIVERGENCE),
    "a teacher's sum is not merged": (VocabSlice, "merged", keeps("s"), DIVERGENCE),
    "smoothing over a slice": (_Call, "uniform", uniform_over_a_slice, functools.partial(
        agree, *cross_entropy(None, label_smoothing=0.1), "mixed", torch.float32)),
}  # fmt: skip


def unseen() -> list[str]:
    """Faults that no rank has seen."""
    found = []
    for name, (owner, attribute, fault, case) in FAULTS.items():
        seen = False
        with mock.patch.object(owner, attribute, fault):
            try:
                case()
            except AssertionError:
                seen = True
        if not any(by_rank(seen)):
            found.append(name)
    return found


def checked() -> list[str]:
    """Raises where something is wrong; returns the faults that no rank has seen."""
    with mock.patch.object(tiling, "head_chunk", lambda n, *args, **kwargs: min(max(n, 1), CHUNK)):
        ops()
        divergences()
        predictions()
        refused()
        for dtype in (torch.float32, torch.bfloat16):
            nothing_else_is_said(dtype)
        return unseen()
