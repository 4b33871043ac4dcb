"""What the tests of captured bodies have in common: a model whose body is replayed, and the same model run eagerly.

The eager model computes each batch in the bucket that the other one was replayed in: with as many tokens, and attention
that goes by the same table on the device. So both compute the same operators, and their results have the same bits.
"""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

from npu_trainer_kernels import NpuKernels, apply_npu_kernels
from npu_trainer_kernels.ops.attention import BoundedSegments, Room, table_of, uploaded
from npu_trainer_kernels.patching.body import Batch, BodyForward, packed_row, packing_for
from tests.models import small_model
from tests.patching.captured import Outcome, assert_same, rows
from tests.patching.padded import Step, loss_of, values

__all__ = ["STEPS", "BodyTwins", "llama_bodies"]

STEPS = tuple(
    rows(*lengths, seed=seed)
    for seed, lengths in enumerate(((30, 10, 15, 5), (8, 24, 11, 13), (9, 30), (20, 17, 1, 22), (12,) * 5, (30, 19, 2)))
)
"""Batches with other lengths and other numbers of rows, 39 to 60 tokens each, in one bucket."""


class BodyTwins:
    """A model with a captured body, and the same model whose body runs eagerly in the same buckets.

    Attributes:
        model, eager: the two.
        kernels, eager_kernels: their handles.
        rooms: the bounds of each replay.
    """

    def __init__(self, model: Any, prepare: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.options = {"backend": "torch", "capture": "on", **options}
        self.model, self.eager = model, copy.deepcopy(model)
        self.kernels, self.eager_kernels = (self._applied(each, prepare) for each in self.both)
        self.rooms: list[Room] = []
        self._used: deque[Room | None] = deque()
        self._kept: list[tuple[Outcome, Outcome]] = []
        replayed, served = self.bodies._replayed, self.bodies.call

        def noted(found: Any, *args: Any) -> Any:
            self.rooms.append(found.room)
            self._used[-1] = found.room
            return replayed(found, *args)

        def call(*args: Any) -> Any:
            self._used.append(None)
            return served(*args)

        self.bodies._replayed, self.bodies.call = noted, call
        self.eager_kernels.settings.bodies.call = self._in_the_same_bucket

    def _applied(self, model: Any, prepare: Callable[[Any], Any] | None) -> NpuKernels:
        if prepare is not None:
            prepare(model)
        return apply_npu_kernels(model, **self.options)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.eager

    @property
    def bodies(self) -> Any:
        return self.kernels.settings.bodies

    @property
    def replayed(self) -> int:
        return self.bodies.replayed

    @property
    def reasons(self) -> set[str]:
        """Why the body ran its own code."""
        return set(self.bodies.reasons)

    def steps(self, batches: Any, step: Step = loss_of) -> None:
        """The loss and each gradient of each batch are equal to the bit."""
        for batch in batches:
            found, expected = (values(model, batch, step) for model in self.both)
            assert_same(found, expected)
            self._kept.append((found, {k: None if v is None else v.clone() for k, v in expected.items()}))
        for kept, before in self._kept:
            assert_same(kept, before)  # a later replay has not written to what an earlier one has returned

    def _in_the_same_bucket(self, batch: Batch, forward: BodyForward) -> Any:
        room, where = self._used.popleft(), batch.layout
        if room is None:
            return None
        new = batch.arguments(room.tokens, forward.by_columns)
        table = uploaded(table_of(room, where.lengths, where.key_lengths, where.keys), new["attention_mask"].device)
        body = forward.body
        packing = packing_for(body, body.get_submodule(forward.inner), BoundedSegments(table, room), forward.backend)
        with packed_row(packing):
            return batch.restored(forward.kind.forward(body, **new), room.tokens)


def llama_bodies(prepare: Callable[[Any], Any] | None = None, **overrides: Any) -> BodyTwins:
    return BodyTwins(small_model("llama", **overrides), prepare)
