"""Test setup: Triton kernels run in Triton's interpreter, unless NPU_KERNELS_TEST_DEVICE names an accelerator."""

import contextlib
import os
import zlib
from collections.abc import Generator
from pathlib import Path

DEVICE = os.environ.setdefault("NPU_KERNELS_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    # Read by Triton when a kernel is decorated, so before anything imports the package.
    os.environ["TRITON_INTERPRET"] = "1"
# A kernel that fails must fail its test, not hand over to torch.
os.environ.setdefault("NPU_KERNELS_STRICT", "1")
# What was tuned on the machine that runs the tests is no part of them.
os.environ["NPU_KERNELS_TUNED"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.perturbed import Perturbed, asks_for_bits

# Two ranks of a test on two cores: one thread each, unless somebody asks how the sums of several threads fare.
torch.set_num_threads(int(os.environ.get("NPU_KERNELS_TEST_THREADS", "1")))


# Files of a copy of the repository (test_extending.py).
collect_ignore = ["extending"]
_NAMES = ("ascend", "browser", "frameworks", "hub_kernels", "npu_contract", "oldest", "zero3")
_APART = [Path(__file__).parent / name for name in _NAMES]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out tests that have a session and an environment of their own (`make test-ascend`,
    `make test-frameworks`, `make test-hub-kernels`, `make test-npu-contract`, `make test-oldest`, `make test-site`,
    `make test-zero3`), unless they are what was asked for."""
    if collection_path not in _APART:
        return None
    arguments = (Path(argument.partition("::")[0]).resolve() for argument in config.args)
    return None if any(argument.is_relative_to(collection_path) for argument in arguments) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leaves out tests marked full, and of each parametrised test all cases but those that it takes to have "
        "every value of every parameter once",
    )
    parser.addoption(
        "--perturbed",
        choices=("bits", "only-bits", "all"),
        help="moves the results of PyTorch's products within their rounding, by the layout of their operands "
        "(tests/perturbed.py): in tests that ask for equal bits, in these and no other test is run, or in all",
    )


def _is_full(item: pytest.Item) -> bool:
    """Whether a test is marked full. A mark with words is for the cases alone that have one of them in their name."""
    marker = item.get_closest_marker("full")
    return marker is not None and (not marker.args or any(word in item.name.partition("[")[2] for word in marker.args))


def _name(value: object) -> object:
    """Returns what tells a parameter's value from others."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what `--quick` wants, and refuses tests of which it would keep no case.

    Cases are looked at in an order that has nothing to do with their values, so that values of two parameters meet at
    random, and always the same ones.
    """
    if config.getoption("--perturbed") == "only-bits":
        config.hook.pytest_deselected(
            items=[item for item in items if not asks_for_bits(getattr(item, "function", None))]
        )
        items[:] = [item for item in items if asks_for_bits(getattr(item, "function", None))]
    if not config.getoption("--quick"):
        return
    seen: set[tuple[object, ...]] = set()
    kept: set[pytest.Item] = set()
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        parameters = getattr(item, "callspec").params if hasattr(item, "callspec") else {}  # noqa: B009
        test = item.nodeid.partition("[")[0]
        values = {(test, name, _name(value)) for name, value in parameters.items()} or {(test,)}
        if not _is_full(item) and not values <= seen:
            kept.add(item)
            seen |= values
    lost = without_a_quick_case(items, kept)
    if lost and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("--quick keeps no case of these tests (CONTRIBUTING.md):\n" + "\n".join(lost))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def without_a_quick_case(items: list[pytest.Item], kept: set[pytest.Item]) -> list[str]:
    """Returns the tests that have no case among the kept ones, and whose mark names no test of their file that has."""
    tests = {item.nodeid.partition("[")[0]: item for item in items}
    quick = {item.nodeid.partition("[")[0] for item in kept}
    lost = []
    for test in tests.keys() - quick:
        marker = tests[test].get_closest_marker("full")
        instead = None if marker is None else marker.kwargs.get("quick")
        if f"{test.partition('::')[0]}::{instead}" not in quick:
            lost.append(test)
    return sorted(lost)


@pytest.fixture
def device() -> torch.device:
    """Where tests put their tensors."""
    return torch.device(DEVICE)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every op is tested with each of its implementations."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Runs a test under `--perturbed` as on a processor whose products round by layout."""
    kind = pyfuncitem.config.getoption("--perturbed")
    with Perturbed() if kind == "all" or (kind and asks_for_bits(pyfuncitem.function)) else contextlib.nullcontext():
        return (yield)
