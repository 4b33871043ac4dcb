"""What the tests of trainers share."""

import gc

import pytest

from npu_trainer_kernels.ops.head import chunks, engine
from npu_trainer_kernels.patching.head import trl_seam


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> None:
    """accelerate collects garbage after every run; what the imports have made need not be searched each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every projection by our head, but for those that are compared with their logits."""
    seen: list[int] = []
    monkeypatch.setattr(trl_seam, "_compare", lambda *_: None)
    original = chunks._project

    def project(x, *args):
        seen.append(x.shape[0])
        return original(x, *args)

    monkeypatch.setattr(chunks, "_project", project)
    return seen


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every backward that formed logits again: none where the plan holds."""
    seen: list[int] = []
    original = engine._recomputed

    def recompute(ctx, saved, d_rows, select=None):
        seen.append(saved.ids.shape[0] if select is None else select.shape[0])
        return original(ctx, saved, d_rows, select)

    monkeypatch.setattr(engine, "_recomputed", recompute)
    return seen
