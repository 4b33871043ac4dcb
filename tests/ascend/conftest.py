"""Setup of the tests that need the real Ascend compiler; they run in a session of their own (`pytest tests/ascend`).

Where the compiler is missing they fail with the command that installs it: a gate that passes by skipping proves
nothing.
"""

import os
import sys
from collections.abc import Iterator

import pytest

# The other tests run kernels in Triton's interpreter, which is decided when a kernel is decorated: before any import.
if "npu_trainer_kernels.support.triton" in sys.modules:
    raise pytest.UsageError("run tests/ascend on their own: other tests have set Triton's interpreter up already")
os.environ["TRITON_INTERPRET"] = "0"

from npu_trainer_kernels.ascend import launcher, toolchain  # noqa: F401  the launcher executes kernels on the CPU
from npu_trainer_kernels.support.cache import CACHE_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Asks for the tools, and uses a cache of this run's own: the tools are tested, not an earlier run's files. Workers
    of one run share it."""
    toolchain.require_all()
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        yield


_USERS_CACHE = os.environ.get(CACHE_VARIABLE)


@pytest.fixture(scope="module")
def kept_cache() -> Iterator[None]:
    """The cache of earlier runs, for tests of kernels: what it holds is named by all that it was made from."""
    with pytest.MonkeyPatch.context() as patch:
        if _USERS_CACHE is None:
            patch.delenv(CACHE_VARIABLE)
        else:
            patch.setenv(CACHE_VARIABLE, _USERS_CACHE)
        yield
