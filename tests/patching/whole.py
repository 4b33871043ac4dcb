"""What the tests of captured bodies have in common: a model whose body is replayed, and the same model run eagerly.

The eager model computes each batch in the bucket that the other one was replayed in: with as many tokens, and attention
that goes by the same table on the device. So both compute the same operators, and their results have the same bits.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from npu_trainer_kernels import NpuKernels
from npu_trainer_kernels.ops.attention import BoundedSegments, Room, table_of, uploaded
from npu_trainer_kernels.patching.body import Batch, BodyForward, packed_row, packing_for
from tests.models import small_model
from tests.patching.captured import Twins, rows

__all__ = ["STEPS", "BodyTwins", "llama_bodies"]

STEPS = tuple(
    rows(*lengths, seed=seed)
    for seed, lengths in enumerate(((30, 10, 15, 5), (8, 24, 11, 13), (9, 30), (20, 17, 1, 22), (12,) * 5, (30, 19, 2)))
)
"""Batches with other lengths and other numbers of rows, 39 to 60 tokens each, in one bucket."""


class BodyTwins(Twins):
    """A model with a captured body, and the same model whose body runs eagerly in the same buckets."""

    def __init__(self, model: Any, prepare: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.rooms: list[Room] = []
        super().__init__(model, prepare, **{"capture": "body", **options})
        self._used: deque[Room | None] = deque()
        replayed, served = self.layers._replayed, self.layers.call

        def noted(found: Any, *args: Any) -> Any:
            self.rooms.append(found.room)
            self._used[-1] = found.room
            return replayed(found, *args)

        def call(*args: Any) -> Any:
            self._used.append(None)
            return served(*args)

        self.layers._replayed, self.layers.call = noted, call

    def _eager(self, kernels: NpuKernels) -> None:
        kernels.settings.bodies.call = self._in_the_same_bucket

    def _in_the_same_bucket(self, batch: Batch, forward: BodyForward) -> Any:
        room, where = self._used.popleft(), batch.layout
        if room is None:
            return None
        new = batch.arguments(room.tokens, forward.by_columns)
        table = uploaded(table_of(room, where.lengths, where.key_lengths, where.keys), new["attention_mask"].device)
        body = forward.body
        packing = packing_for(
            body, body.get_submodule(forward.inner), BoundedSegments(table, room), forward.backend, room.tokens
        )
        with packed_row(packing):
            return batch.restored(forward.kind.forward(body, **new), room.tokens)

    @property
    def layers(self) -> Any:
        return self.kernels.settings.bodies


def llama_bodies(prepare: Callable[[Any], Any] | None = None, **overrides: Any) -> BodyTwins:
    return BodyTwins(small_model("llama", **overrides), prepare)
