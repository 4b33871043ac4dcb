"""Rows that a result has several times: values, and gradients in a fixed order, against a matrix product in fp64."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_trainer_kernels.ops import Shared, take
from npu_trainer_kernels.ops.attention import shared_rows
from tests.closeness import assert_op_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INDEXES = {
    "as they are": ([0, 1, 2, 3], 4),
    "another order": ([2, 0, 3, 1], 4),
    "some never used": ([3, 1], 5),
    "padding": ([-1, 0, 1, -1, 2, -1], 3),
    "all padding": ([-1, -1], 3),
    "one row for all": ([0] * 7, 1),
    "unequally often": ([0, 1, 0, 2, 1, 0, 4, 4, 0], 5),
    "a prompt that eight rows share": ([*range(5), *(t for b in range(8) for t in (*range(5), 5 + b))], 13),
    "often, and padding": ([1, -1, 1, 0, -1, 1], 2),
    "empty result": ([], 3),
    "empty source": ([-1, -1, -1], 0),
}


def by_product(x: torch.Tensor, index: list[int]) -> torch.Tensor:
    """The same as a product with a matrix of zeros and ones, rounded once."""
    exact = torch.promote_types(x.dtype, torch.float32)
    places = torch.zeros(len(index), x.shape[0], dtype=exact, device=x.device)
    for i, row in enumerate(index):
        if row >= 0:
            places[i, row] = 1
    return torch.tensordot(places, x.to(exact), 1).to(x.dtype)


def upstream(outputs):
    (y,) = outputs
    factors = (torch.arange(y.numel(), device=y.device) * 0.37).sin().view(y.shape)
    return (y * factors.to(y.dtype)).sum(dtype=torch.float64 if y.device.type == "cpu" else None)


def check(index: list[int], n: int, dtype: torch.dtype, device: torch.device, *shape: int) -> None:
    x = torch.randn(n, *shape, device=device).to(dtype).requires_grad_()
    rows = Shared.make(np.array(index, np.int64), n, device)
    assert_op_close(lambda t: take(t, rows), lambda t: by_product(t, index), [x], upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INDEXES)
def test_values_and_gradients(name, dtype, device):
    check(*INDEXES[name], dtype, device, 3, 4)


def test_rows_without_a_second_dimension(device):
    check(*INDEXES["unequally often"], torch.float32, device)


def test_sums_are_fp32(device):
    """4096 times 1 / 256 in bf16: at 1 a sum in bf16 would stop growing."""
    x = torch.zeros(1, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = take(x, Shared.make(np.zeros(4096, np.int64), 1, device))
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 1 / 256))
    assert dx.tolist() == [[16.0, 16.0]]


def test_the_same_bits_every_time(device):
    index, n = INDEXES["a prompt that eight rows share"]
    rows = Shared.make(np.array(index), n, device)
    x = torch.randn(n, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(len(index), 64, dtype=torch.bfloat16, device=device)
    first, *others = (torch.autograd.grad(take(x, rows), x, dy)[0] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


def test_a_row_of_nan_stays_where_it_is(device):
    """The row that stands in for padding may hold anything."""
    x = torch.tensor([[torch.nan], [2.0]], device=device, requires_grad=True)
    y = take(x, Shared.make(np.array([-1, 1, -1]), 2, device))
    assert y.tolist() == [[0.0], [2.0], [0.0]]
    (dx,) = torch.autograd.grad(y, x, torch.tensor([[torch.nan], [3.0], [torch.nan]], device=device))
    assert dx.tolist() == [[0.0], [3.0]]


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: values read by the host, and copies from one device to another, except
    those from pinned memory for which nobody waits."""

    READ = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        to = (kwargs or {}).get("device")
        copied = name == "aten::_to_copy" and to is not None and to != args[0].device
        queued = copied and kwargs.get("non_blocking", False) and args[0].is_pinned()
        if name in self.READ or (copied and not queued):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", INDEXES)
def test_nothing_waits_for_the_device(name, device):
    index, n = INDEXES[name]
    rows = Shared.make(np.array(index, np.int64), n, device)
    x = torch.randn(n, 3, device=device, requires_grad=True)
    with Waits() as waits:
        y = take(x, rows)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert waits.found == []


@pytest.mark.parametrize(
    ("index", "n", "message"),
    [
        ([0, 3], 3, r"index must lie in \[-1, 3\); got values from 0 to 3"),
        ([-2, 1], 3, r"index must lie in \[-1, 3\); got values from -2 to 1"),
        ([[0, 1]], 3, r"index must be a list of integers; got int64 of shape \[1, 2\]"),
        ([0.0, 1.0], 3, r"index must be a list of integers; got float64"),
    ],
)
def test_bad_indexes(index, n, message):
    with pytest.raises(ValueError, match=message):
        Shared.make(np.array(index), n, "cpu")


def test_another_number_of_rows():
    rows = Shared.make(np.array([0, 1]), 3, "cpu")
    with pytest.raises(ValueError, match=r"x must have 3 rows, .* got shape \[4, 2\]"):
        take(torch.zeros(4, 2), rows)


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def counted_once(monkeypatch):
    """A shared row gets the gradient of its first use alone."""
    monkeypatch.setattr(shared_rows.Shared, "gradient", lambda self, dy: self._once.of(dy))


def last_use_lost(monkeypatch):
    original = shared_rows.Shared.gradient

    def gradient(self, dy):
        if self._uses is None:
            return original(self, dy)
        plan, most = self._uses
        rows = plan.rows[: -len(self._several)]
        empty = None if plan.empty is None else plan.empty[: -len(self._several)]
        less = shared_rows.Shared(
            self.index, self.n, self.gather, self._once, self._several, (shared_rows.RowIndex(rows, empty), most - 1)
        )
        return original(less, dy)

    monkeypatch.setattr(shared_rows.Shared, "gradient", gradient)


def padding_not_zero(monkeypatch):
    monkeypatch.setattr(shared_rows.RowIndex, "of", lambda self, x: x.index_select(0, self.rows))


FAULTS = {
    counted_once: lambda device: check(*INDEXES["unequally often"], torch.float32, device, 3),
    last_use_lost: lambda device: check(*INDEXES["a prompt that eight rows share"], torch.float32, device, 3),
    padding_not_zero: lambda device: check(*INDEXES["padding"], torch.float32, device, 3),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, device, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="error"):
        FAULTS[fault](device)


def test_every_index_of_three_rows(device):
    """All of them, up to four places long."""
    for length in range(5):
        for index in itertools.product((-1, 0, 1, 2), repeat=length):
            check(list(index), 3, torch.float32, device, 2)
