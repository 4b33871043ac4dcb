"""What a graph may hold: operators that are refused by name, and tapes that replay into the same memory."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from npu_trainer_kernels.capture.tape import Refused, Tape, Watch

HOST = "it reads numbers of the device on the host"
UNKNOWN = "it reads a tensor that is no input, parameter or buffer of it"
RANDOM = "it draws random numbers"
WRITES = "it writes to a parameter or a buffer"
CONSTANT = torch.ones(3)


def taped(function: Callable[..., object], *known: torch.Tensor, fixed: tuple[torch.Tensor, ...] = ()) -> Tape:
    watch, tape = Watch(known, fixed), Tape()
    watch.target = tape
    with watch:
        function(*known)
    return tape


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), f"{HOST} (_local_scalar_dense)"),
    "float": (lambda x: float(x.sum()), f"{HOST} (_local_scalar_dense)"),
    "bool": (lambda x: 1 if x.sum() > 0 else 0, f"{HOST} (_local_scalar_dense)"),
    "tolist": (lambda x: x.tolist(), f"{HOST} (tolist)"),
    "numpy": (lambda x: x.numpy(), f"{HOST} (numpy)"),
    "print": (lambda x: str(x), f"{HOST} (__repr__)"),
    "nonzero": (lambda x: x.nonzero(), f"{HOST} (nonzero)"),
    "where": (lambda x: torch.where(x > 0), f"{HOST} (nonzero)"),
    "boolean index": (lambda x: x[x > 0], f"{HOST} (index)"),
    "boolean index that is written to": (lambda x: x.exp().__setitem__(x > 0, x[:1].exp()), f"{HOST} (index_put_)"),
    "masked_select": (lambda x: x.masked_select(x > 0), f"{HOST} (masked_select)"),
    "unique": (lambda x: x.unique(), f"{HOST} (_unique2)"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), f"{HOST} (repeat_interleave)"),
    "a copy to another device": (
        lambda x: x.to("meta"),
        "it copies numbers from a device to another one (_to_copy)",
    ),
    "a scalar of another device": (
        lambda x: x.sum().to("meta"),
        "it copies numbers from a device to another one (_to_copy)",
    ),
    "equal": (lambda x: torch.equal(x, x.exp()), f"{HOST} (equal)"),
    "a constant of Python": (lambda x: x + torch.tensor(2.0), f"{UNKNOWN} (lift_fresh)"),
    "a constant of a module": (lambda x: x + CONSTANT, f"{UNKNOWN} (add)"),
    "dropout": (lambda x: functional.dropout(x, 0.5), f"{RANDOM} (bernoulli_)"),
    "rand": (lambda x: x + torch.rand(3), f"{RANDOM} (rand)"),
    "normal_": (lambda x: x.exp().normal_(), f"{RANDOM} (normal_)"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_operators_that_are_refused(function: Callable[[torch.Tensor], object], reason: str) -> None:
    with pytest.raises(Refused) as error:
        taped(function, torch.randn(3))
    assert str(error.value) == reason


def test_buffers_and_parameters_are_not_written_to() -> None:
    buffer = torch.zeros(3)
    writes: list[tuple[Callable[[torch.Tensor], object], str]] = [
        (lambda x: buffer.add_(x), "add_"),
        (lambda x: buffer[:2].copy_(x[:2]), "copy_"),
        (lambda x: torch.exp(x, out=buffer), "exp"),
        (lambda x: torch._foreach_add_([buffer], [x]), "_foreach_add_"),
    ]
    for function, name in writes:
        with pytest.raises(Refused) as error:
            taped(function, torch.randn(3), fixed=(buffer,))
        assert str(error.value) == f"{WRITES} ({name})"
    assert not buffer.any()
    taped(lambda x: x + buffer, torch.randn(3), fixed=(buffer,))


REPLAYED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a chain": lambda x, y: (x @ y).exp().sum(0),
    "views": lambda x, y: x.t()[1:].reshape(-1)[::2] + y.flatten()[:6],
    "in place": lambda x, y: x.exp().add_(y).mul_(2)[1:].zero_().add_(x[1:]),
    "several results": lambda x, y: x.topk(2)[0] + torch.split(y, 2)[0][:, :2].sum() + x.max(1).indices[:, None],
    "lists": lambda x, y: torch.stack(torch._foreach_mul([x, y], 2.0)),
    "lists in place": lambda x, y: _doubled(x.clone(), y.clone()),
    "factories": lambda x, y: x + torch.zeros(4, 4).fill_(3) + torch.arange(4) + torch.full_like(y, 2),
    "integer indices": lambda x, y: x[y.argmax(1)] + x.gather(1, y.argsort(1)),
    "dtypes": lambda x, y: x.bfloat16().matmul(y.bfloat16()).float(),
    "norm": lambda x, y: functional.layer_norm(x, (4,), y[0], y[1]),
}


def _doubled(*tensors: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_(list(tensors), 2.0)
    return tensors[0] @ tensors[1]


@pytest.mark.parametrize("function", REPLAYED.values(), ids=REPLAYED)
def test_a_replay_computes_with_new_values_in_the_same_memory(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    made: list[torch.Tensor] = []
    tape = taped(lambda *tensors: made.append(function(*tensors)), x, y)
    for _ in range(2):
        x.copy_(torch.randn(4, 4))
        y.copy_(torch.randn(4, 4))
        address = made[0].data_ptr()
        tape.replay()
        assert made[0].data_ptr() == address
        assert torch.equal(made[0], function(x, y))


def test_nothing_is_looked_at_while_there_is_no_target() -> None:
    watch = Watch((), ())
    with watch:
        assert torch.randn(3).sum().item() is not None


def test_a_tape_keeps_no_graph_of_autograd() -> None:
    weight = torch.randn(3, requires_grad=True)
    tape = taped(lambda w: (w * 2).sum(), weight)
    assert all(not t.requires_grad for _, args, _, results in tape.steps for t in (*args, *results)
               if isinstance(t, torch.Tensor))  # fmt: skip


def test_a_watch_is_gone_with_its_last_use():
    """In a cycle it would keep weak references to storages, and the heap below them, until Python's collector runs."""
    begun = gc.isenabled()
    gc.disable()
    try:
        watch = Watch([], [])
        seen = weakref.ref(watch)
        with watch:
            watch.knows([torch.ones(3)])
        del watch
        assert seen() is None
    finally:
        if begun:
            gc.enable()
