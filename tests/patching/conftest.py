import pytest

from .promised import Counted


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)
