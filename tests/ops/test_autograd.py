"""What every op owes to autograd, whatever it computes: ops are taken from the package's own table of them."""

import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

from npu_trainer_kernels import ops
from npu_trainer_kernels.descriptions import FORMS, Inputs, ModelShapes, Workload, as_tuple, of_model
from npu_trainer_kernels.ops import fused_linear_cross_entropy, grpo_loss, linear_logprob
from npu_trainer_kernels.ops.head import chunks
from npu_trainer_kernels.ops.linear_attention.chunk_states import states
from npu_trainer_kernels.ops.linear_attention.grid import Grid
from npu_trainer_kernels.ops.slices import in_slices
from tests.closeness import assert_op_close

SHAPES = ModelShapes(
    hidden=24,
    intermediate=40,
    vocabulary=67,
    heads=2,
    kv_heads=1,
    head_dim=12,
    experts=4,
    slots=2,
    channels=20,
    taps=4,
    state_keys=1,
    state_values=2,
    key_size=6,
    value_size=4,
)
WORKLOADS = {work.op: work for work in of_model(SHAPES, tokens=16, dtype="float32")}
# The attention of generation has no gradient.
DIFFERENTIABLE = [op for op, work in WORKLOADS.items() if work.inputs(torch.device("cpu")).leaves]


def test_every_op_is_here():
    assert WORKLOADS.keys() == FORMS.keys()
    assert FORMS.keys() - set(DIFFERENTIABLE) == {"decode_attention"}


def scalar(outputs, inputs: Inputs) -> torch.Tensor:
    """A loss of an op's outputs, each gradient of which differs from the others."""
    grads = inputs.grads or (torch.ones(()),)
    return sum((o * g).sum() for o, g in zip(as_tuple(outputs), grads, strict=True))


def leaves(inputs: Inputs) -> list[torch.Tensor]:
    return [inputs.tensors[name] for name in inputs.leaves]


def call(work: Workload, backend: str, device: torch.device):
    inputs = work.inputs(device)
    return work.ours(backend)(inputs.tensors), inputs


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives
# ---------------------------------------------------------------------------------------------------------------------


def autograd_functions() -> set[str]:
    """The autograd functions of the package's ops, by name."""
    found = set()
    for info in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                found.add(value.__name__)
    return found


def reached(outputs) -> set[str]:
    """The autograd functions in the graph of some outputs."""
    seen, todo = set(), [o.grad_fn for o in as_tuple(outputs)]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return {node.name().removesuffix("Backward") for node in seen}


def loss_on_logits(device, backend):
    logits = torch.randn(2, 5, 31, device=device, requires_grad=True)
    ids, advantages = torch.randint(0, 31, (2, 5), device=device), torch.tensor([1.0, -0.5], device=device)
    return grpo_loss(logits, ids, advantages, backend=backend).loss, [logits]


def experts_with_a_gate_of_their_own(device, backend):
    """Step by step, as `FORMS` has no form for."""
    inputs = WORKLOADS["moe_experts"].inputs(device)
    t = inputs.tensors
    y = ops.moe_experts(
        t["x"], t["ids"], t["probabilities"], t["gate_up_weight"], t["down_weight"],
        gate=lambda h: h[:, : h.shape[1] // 2].tanh(), backend=backend,
    )  # fmt: skip
    return scalar(y, inputs), leaves(inputs)


def rows_in_slices(device):
    rows, weight = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((12, 5), (7, 5)))

    def product(x):
        return x @ weight.t()

    y = in_slices(product, rows, lambda: [weight], tokens=4, width=7, draws=False)
    return (y * torch.linspace(-1, 1, 84, device=device).view(12, 7)).sum(), [rows, weight]


def state_of_linear_attention(device):
    shapes = {"q": (1, 20, 1, 6), "k": (1, 20, 1, 6), "v": (1, 20, 2, 4), "g": (1, 20, 2), "beta": (1, 20, 2)}
    given = {name: (-torch.rand(shape, device=device)).requires_grad_() for name, shape in shapes.items()}
    o = ops.gated_delta_rule(**given, backend="torch")
    return (o * torch.linspace(-1, 1, o.numel(), device=device).view(o.shape)).sum(), [*given.values()]


def states_of_chunks(device):
    """The function inside of the one above, whose graph no other one contains."""
    grid = Grid.of(torch.zeros(1, 20, 1, 4, device=device), None, lambda length: length)
    shapes = [(1, 1, grid.count, grid.length, size) for size in (4, 6, 6)]
    given = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    decay = torch.rand(1, 1, grid.count, 1, device=device, requires_grad=True)
    entering, _, left = states(*given, decay, None, grid, "triton")
    return entering.square().sum() + left.square().sum(), [*given, decay]


def check_refuses(loss: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    found = torch.autograd.grad(loss, wanted, create_graph=True)
    # A penalty beside something that can be differentiated: as a constant, it would pass unnoticed.
    penalty = sum(g.square().sum() for g in found) + sum(t.square().sum() for t in wanted)
    # By ours, or by PyTorch's own attention.
    with pytest.raises(RuntimeError, match=r"cannot be differentiated|attention\w*_backward is not implemented"):
        penalty.backward()


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_second_derivatives_raise(device, backend, op):
    outputs, inputs = call(WORKLOADS[op], backend, device)
    check_refuses(scalar(outputs, inputs), leaves(inputs))


def test_second_derivatives_raise_on_logits(device, backend):
    check_refuses(*loss_on_logits(device, backend))


def test_second_derivatives_raise_in_steps(device, backend):
    check_refuses(*experts_with_a_gate_of_their_own(device, backend))


def test_second_derivatives_raise_in_slices(device):
    loss, wanted = rows_in_slices(device)
    check_refuses(loss, wanted)
    # By way of a parameter, which the function has not saved.
    loss, (rows, weight) = rows_in_slices(device)
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(gradient.sum(), weight, allow_unused=True)


def test_second_derivatives_raise_of_the_gated_delta_rule(device):
    check_refuses(*state_of_linear_attention(device))


def test_second_derivatives_raise_of_states(device):
    check_refuses(*states_of_chunks(device))


def test_second_derivatives_were_asked_of_every_function(device):
    asked = reached(loss_on_logits(device, "torch")[0])
    asked |= reached(experts_with_a_gate_of_their_own(device, "torch")[0])
    asked |= reached(rows_in_slices(device)[0])
    asked |= reached(state_of_linear_attention(device)[0])
    asked |= reached(states_of_chunks(device)[0])
    for op in DIFFERENTIABLE:
        asked |= reached(call(WORKLOADS[op], "torch", device)[0])
    # The one for operators without an autograd of their own is asked where they have stand-ins (test_segment_kernels);
    # an anchor is below gradients, and no op's.
    assert autograd_functions() - {"ByKernel", "Anchor"} <= asked


Objective = Callable[..., torch.Tensor]
Leaves = tuple[torch.Tensor, ...]


def directions(at: Leaves) -> Leaves:
    return tuple(torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape) for t in at)


def by_gradients_of_gradients(f: Objective, at: Leaves) -> Leaves:
    at = tuple(t.detach().clone().requires_grad_() for t in at)
    found = torch.autograd.grad(f(*at), at, create_graph=True)
    # In the graph whatever the gradients are.
    dots = sum((g * v).sum() + 0 * t.sum() for g, v, t in zip(found, directions(at), at, strict=True))
    return torch.autograd.grad(dots, at, allow_unused=True, materialize_grads=True)


def by_forward_mode(f: Objective, at: Leaves) -> Leaves:
    with forward_ad.dual_level():
        result = f(*(forward_ad.make_dual(t, v) for t, v in zip(at, directions(at), strict=True)))
        tangent = forward_ad.unpack_dual(result).tangent
        return (torch.zeros_like(result) if tangent is None else tangent,)


def first(at: Leaves) -> tuple[int, ...]:
    return tuple(range(len(at)))


DERIVATIVES: dict[str, Callable[[Objective, Leaves], Leaves]] = {
    "gradients of gradients": by_gradients_of_gradients,
    "functional.hvp": lambda f, at: functional.hvp(f, at, directions(at))[1],
    "functional.vhp": lambda f, at: functional.vhp(f, at, directions(at))[1],
    "functional.jvp": lambda f, at: (functional.jvp(f, at, directions(at))[1],),
    "func.jvp": lambda f, at: (torch.func.jvp(f, at, directions(at))[1],),
    "func.jvp of func.grad": lambda f, at: torch.func.jvp(torch.func.grad(f, first(at)), at, directions(at))[1],
    "func.vjp of func.grad": lambda f, at: torch.func.vjp(torch.func.grad(f, first(at)), *at)[1](directions(at)),
    "forward mode": by_forward_mode,
}


def objective_of(
    outputs_of: Callable[[dict[str, torch.Tensor]], Any], inputs: Inputs, names: Sequence[str], straight: bool
) -> Objective:
    """Of some of an op's leaves; the others are frozen."""

    def objective(*at: torch.Tensor) -> torch.Tensor:
        tensors = {name: t.detach() for name, t in inputs.tensors.items()} | dict(zip(names, at, strict=True))
        outputs = [o for o in as_tuple(outputs_of(tensors)) if o.is_floating_point()]
        grads = inputs.grads or (torch.ones(()),)
        terms = (o * g for o, g in zip(outputs, grads, strict=False))
        return sum(t.sum() if straight else t.square().sum() for t in terms)

    return objective


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", DERIVATIVES)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_derivatives_of_every_form_raise_or_are_right(device, op, form, frozen, straight):
    """Of an objective that is linear in an op's outputs nothing that arrives for them depends on anything, so that what
    the op has saved must: and where that does not either, a zero is right. An op saves less where leaves beside its
    first are frozen."""
    work = WORKLOADS[op]
    inputs = work.inputs(device)
    names = inputs.leaves[:1] if frozen else inputs.leaves
    at = tuple(inputs.tensors[name].detach() for name in names)
    try:
        found = DERIVATIVES[form](objective_of(work.ours("torch"), inputs, names, straight), at)
    except RuntimeError as error:
        if re.search(REFUSALS, str(error)) is None:
            raise
        return
    expected = DERIVATIVES[form](objective_of(work.reference, inputs, names, straight), at)
    torch.testing.assert_close(tuple(found), tuple(expected))


REFUSALS = (
    r"cannot be differentiated|setup_context|forward (mode )?AD|functorch"
    r"|attention\w*_backward is not implemented|jvp is not implemented"
)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_graph_of_the_gradient_changes_no_gradient(device, backend, op):
    outputs, inputs = call(WORKLOADS[op], backend, device)
    loss = scalar(outputs, inputs)
    first = torch.autograd.grad(loss, leaves(inputs), create_graph=True)
    again = scalar(WORKLOADS[op].ours(backend)(inputs.tensors), inputs)
    assert all(map(torch.equal, first, torch.autograd.grad(again, leaves(inputs))))


# ---------------------------------------------------------------------------------------------------------------------
# Without gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(device, backend, op, inside):
    """With inputs that were made outside or inside of it; parameters are always made outside."""
    work = WORKLOADS[op]
    tensors = work.inputs(device).tensors

    def call(fn):
        def run(*values):
            with torch.inference_mode():
                made = {
                    name: value.clone() if inside and "weight" not in name else value
                    for name, value in zip(tensors, values, strict=True)
                }
                found = as_tuple(fn(made))
            assert not any(t.requires_grad for t in found)
            return found

        return run

    assert_op_close(call(work.ours(backend)), call(work.reference), list(tensors.values()))


HEAD_CALLS = {
    "linear_cross_entropy": lambda x, w, ids, b: fused_linear_cross_entropy(x, w, ids, backend=b),
    "linear_cross_entropy, smoothed": lambda x, w, ids, b: fused_linear_cross_entropy(
        x, w, ids, label_smoothing=0.1, backend=b
    ),
    "linear_logprob": lambda x, w, ids, b: linear_logprob(x, w, ids, backend=b).log_prob.sum(),
    "linear_divergence": lambda x, w, ids, b: ops.linear_divergence(x, w, x.flip(0), w, beta=0.5, backend=b),
    "grpo_loss": lambda x, w, ids, b: (
        ops.fused_linear_grpo_loss(x.unsqueeze(0), w, ids.unsqueeze(0), torch.ones(1, device=x.device), backend=b).loss
    ),
}


def head_inputs(device, frozen=False):
    x = torch.randn(21, 16, device=device, requires_grad=True)
    weight = torch.randn(53, 16, device=device, requires_grad=not frozen)
    return x, weight, torch.randint(0, 53, (21,), device=device)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", HEAD_CALLS)
def test_nothing_is_formed_for_a_backward_that_will_not_come(device, backend, monkeypatch, name, mode):
    """One product, of x and the weight (and the teacher's): no gradient of the weight, none of x, and none of the
    objective."""
    formed = []
    monkeypatch.setattr(chunks.Gradients, "empty", lambda *a, **k: formed.append(a))
    products = Counter()
    for product in ("mm", "addmm"):
        original = getattr(torch, product)

        def counted(*args, original=original, product=product, **kwargs):
            products[product] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, product, counted)
    with mode():
        HEAD_CALLS[name](*head_inputs(device), backend)
    assert formed == []
    assert products == {"mm": 2 if name == "linear_divergence" else 1}


# ---------------------------------------------------------------------------------------------------------------------
# What backward reads
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_saved_tensors_are_read_at_most_once(device, backend, op):
    """Whoever keeps them elsewhere (on the host, or as a checkpoint) brings them back at every reading."""
    read = Counter()

    def pack(t):
        return len(packed), packed.append(t)

    def unpack(key):
        read[key[0]] += 1
        return packed[key[0]]

    packed: list[torch.Tensor] = []
    work = WORKLOADS[op]
    inputs = work.inputs(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = work.ours(backend)(inputs.tensors)
    torch.autograd.grad(scalar(outputs, inputs), leaves(inputs))
    assert packed
    assert max(read.values(), default=0) <= 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", HEAD_CALLS)
def test_a_checkpointed_head(device, backend, name, frozen, reentrant):
    """Of which what is saved is formed a second time, when it is read."""
    x, weight, ids = head_inputs(device, frozen)

    def gradients(loss):
        x.grad = weight.grad = None
        (2.0 * loss).backward()
        return [t.grad for t in (x, weight) if t.requires_grad]

    def head(x, weight):
        return HEAD_CALLS[name](x, weight, ids, backend)

    expected = gradients(head(x, weight))
    found = gradients(checkpoint(head, x, weight, use_reentrant=reentrant))
    assert all(map(torch.equal, found, expected))
