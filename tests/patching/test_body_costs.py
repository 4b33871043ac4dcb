"""Which bucket a row runs in, by scripted costs."""

import math
from typing import Any

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.ops.attention import Room
from npu_trainer_kernels.patching.bodies import BodyCapture, body_capture
from npu_trainer_kernels.patching.bodies.body_costs import ByCosts, Costs
from tests.models import small_model
from tests.patching.captured import rows
from tests.patching.padded import loss_of

MS, US = 1e-3, 1e-6
HOST_LIMITED = Costs(host=240 * MS, token=10 * US)
DEVICE_LIMITED = Costs(host=240 * MS, token=300 * US)


def run(costs: Costs, lengths: list[int], capture: float = 2.0) -> tuple[ByCosts, list[int | None], float]:
    """Returns the choice, the buckets of rows of these lengths, and the seconds of all of it."""
    choice, rooms, chosen, seconds = ByCosts(), set[int](), list[int | None](), 0.0
    choice.costs = costs
    for tokens in lengths:
        row = Room(tokens, 4, 64)
        fits = [Room(size, 64, 64) for size in rooms if size >= tokens]
        bucket = choice.bucket(row, fits)
        if bucket is not None and bucket not in rooms:
            rooms.add(bucket)
            choice.captured(bucket, False, capture)
            seconds += capture
        seconds += costs.eager(tokens) if bucket is None else costs.replay(bucket)
        if bucket is not None:
            choice.replayed(tokens, bucket)
        chosen.append(bucket)
    return choice, chosen, seconds


def drawn(count: int, least: int, most: int) -> list[int]:
    return torch.randint(least, most, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_where_the_host_is_the_limit_few_buckets_are_captured_at_once() -> None:
    _, chosen, _ = run(HOST_LIMITED, drawn(50, 1000, 2300))
    assert chosen.count(None) * HOST_LIMITED.host <= 2.0  # less than a capture
    assert {*chosen} - {None} <= {1024, 2048, 4096}
    assert len({*chosen[5:]} - {None}) <= 2


def test_where_the_device_is_the_limit_nothing_is_captured() -> None:
    _, chosen, _ = run(DEVICE_LIMITED, drawn(500, 1000, 2300))
    assert set(chosen) == {None}


def test_a_finer_bucket_is_captured_when_filling_has_cost_as_much_as_its_capture() -> None:
    _, chosen, _ = run(HOST_LIMITED, [5000] * 400, capture=10.0)
    lost = (8192 - 5120) * HOST_LIMITED.token  # in each call
    assert chosen[0] == 8192
    assert chosen.index(5120) == math.ceil(10.0 / lost)
    _, chosen, _ = run(HOST_LIMITED, [5000] * 20, capture=0.2)
    assert chosen.index(5120) < 20  # it is expected to have cost as much before long


def test_a_bucket_that_would_be_a_little_faster_is_not_captured() -> None:
    """What was measured of one forward may be off by as much."""
    costs = Costs(host=100 * MS, token=45 * US)
    assert costs.replay(2048) < costs.eager(2000) < costs.replay(2048) * 1.2
    assert set(run(costs, [2000] * 500)[1]) == {None}


def test_a_bucket_that_costs_more_than_own_code_is_not_used() -> None:
    costs = Costs(host=100 * MS, token=40 * US)
    _, chosen, _ = run(costs, [1100, *[2040] * 3, 1100])
    assert chosen[1] is None or costs.replay(2048) < costs.eager(2040)
    assert costs.replay(2048) < costs.eager(1100) or chosen[-1] != 2048


@pytest.mark.parametrize("host", [20, 60, 120, 240, 480])
@pytest.mark.parametrize("token", [1, 10, 40, 100, 400])
@pytest.mark.parametrize("most", [1100, 2300, 9000])
def test_runs_lose_at_most_what_capturing_costs(host: int, token: int, most: int) -> None:
    """Beside a run without graphs no run loses more than its captures, at any of its steps. If the host takes twice as
    long as the device, each of 100 steps wins; if it takes no longer, there are none."""
    costs, lengths = Costs(host * MS, token * US), drawn(400, 1000, most)
    capture = 10 * costs.host
    for count in (20, 50, 100, 400):
        choice, chosen, seconds = run(costs, lengths[:count], capture)
        off = sum(map(costs.eager, lengths[:count]))
        captures = len({*chosen} - {None})
        assert seconds <= off + captures * capture
        assert choice.saved == pytest.approx(off - (seconds - captures * capture))
        if host >= 2 * token * most * MS and count >= 100:
            assert seconds < off
        if host <= token * min(lengths) * MS:
            assert captures == 0


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose device is the CPU, with costs that are said instead of measured."""
    costs = {"host": 0.05, "device": 0.01, "first": 1.0}

    def timed(_: Any, function: Any, fills_queue: bool) -> Any:
        costs["first"] *= 0.1
        waits = 0.0 if fills_queue else costs["host"]  # the device for the host, or the host for the queue
        host = costs["host"] + costs["first"] + 0.25 * fills_queue
        return function(), host, costs["device"] + waits

    monkeypatch.setattr(body_capture, "timed", timed)
    monkeypatch.setattr("npu_trainer_kernels.device.captures_unasked", lambda _: True)
    return costs


@pytest.mark.parametrize(("host", "replayed"), [(0.05, True), (0.005, False)])
def test_a_model_is_timed_and_then_captured_if_the_host_is_the_limit(
    scripted: Any, host: float, replayed: bool
) -> None:
    scripted["host"] = host
    model, plain = small_model("llama"), small_model("llama")
    kernels = apply_npu_kernels(model, backend="torch", capture="auto")
    bodies = kernels.settings.bodies
    assert isinstance(bodies, BodyCapture)
    for step in range(6):
        batch = rows(30, 10, 15, 5, seed=step)
        loss, expected = loss_of(model, batch), loss_of(plain, batch)
        loss.backward()
        torch.testing.assert_close(loss, expected)
    assert bodies.replayed == (2 if replayed else 0)
    assert bodies.eager == (4 if replayed else 6)
    assert ("its own code is expected to be faster" in str(bodies)) is not replayed
    saved = bodies.replayed * (2 * host + 0.002 - 3 * 0.01 / 60 * 64) - bodies.seconds
    assert bodies.saved == bodies.saved_since() == pytest.approx(saved)
    kernels.restore()
    assert f"a step without graphs takes the host {2e3 * host + 2:.0f} ms" in str(bodies)


def test_a_step_repeats_and_goes_back() -> None:
    model = small_model("llama")
    assert Costs.of(model, 100, 1.0, 1.0) == Costs(2.0, 0.03)
    with torch.no_grad():
        assert Costs.of(model, 100, 1.0, 1.0) == Costs(1.0, 0.01)
    model.gradient_checkpointing_enable()
    assert Costs.of(model, 100, 1.0, 1.0) == Costs(3.0, 0.04)


def test_a_bucket_between_powers_of_two(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByCosts, "bucket", lambda *_: 80)
    model, plain = small_model("llama"), small_model("llama")
    kernels = apply_npu_kernels(model, backend="torch", capture="auto")
    for step, lengths in enumerate(
        ((30, 20, 11, 9), (20, 8, 13, 30), (30, 30, 19, 1), (5, 30, 30, 2), (30, 30, 12, 8))
    ):
        batch = rows(*lengths, seed=step)
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, batch).backward()
        for (name, mine), own in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad, msg=name)
    assert kernels.settings.bodies.replayed == 1
    assert {one.room.tokens for way in kernels.settings.bodies._ways.values() for one in way.captured} == {80}


def test_nothing_is_saved_by_a_body_that_could_not_be_captured(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_capture, "why_unseen", lambda: "a profiler watches")
    model = small_model("llama")
    bodies = apply_npu_kernels(model, backend="torch", capture="auto").settings.bodies
    for step in range(6):
        loss_of(model, rows(30, 10, 15, 5, seed=step)).backward()
    assert bodies.reasons["a profiler watches"] == 2
    assert bodies.saved == 0
