"""A compiled kernel that is launched again without asking Triton for it: the one that Triton would have found.

On a machine without a GPU: Triton compiles for one, and its driver is one that launches nothing.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks import host
from npu_trainer_kernels import device
from npu_trainer_kernels.ops import launch as launch_module
from npu_trainer_kernels.support.triton import jit
from tests.conftest import DEVICE


def _add_kernel(x, y, n, stride, scale, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * stride, mask=at < n, other=0.0)
    if HAS_SCALE:
        value = value * scale
    tl.store(y + at, value, mask=at < n)


class Driver(host.Driver):
    """Of two GPUs; `launches` has what was launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, ...]] = []
        self.device, self.stream = 0, 7
        self.launcher_cls = lambda source, metadata: lambda *args: self.launches.append(args)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, index: int) -> int:
        return 10 * index + self.stream


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Triton's, empty: what an earlier run compiled says nothing of this process."""
    return str(tmp_path_factory.mktemp("triton"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cache: str):
    fake = Driver()
    monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    # Its properties raise where there is no GPU.
    monkeypatch.setattr(driver, "_active", fake)
    # CPU tensors stand for a GPU's.
    monkeypatch.setattr(launch_module, "INTERPRETED", True)
    monkeypatch.setattr(device, "keeps_compiled", lambda where: True)
    monkeypatch.setattr(launch_module, "_kept", {})
    monkeypatch.setattr(launch_module, "_of_any_length", {})
    return fake


@pytest.fixture(params=[()])
def kernel(gpu, request):
    """A kernel that Triton compiles, with `found` for what it was asked for: one entry for each time."""
    made = JITFunction(_add_kernel, do_not_specialize=list(request.param))
    made.found = []
    run = made.run

    def spy(*args: Any, **kwargs: Any) -> CompiledKernel:
        made.found.append(run(*args, **kwargs))
        return made.found[-1]

    made.run = spy
    yield made
    for compiled in made.found:
        compiled.module = None  # nothing is to be unloaded


KEEPS_COMPILED = device.keeps_compiled
X, Y = torch.zeros(256), torch.zeros(256)
USUAL = {"x": X, "y": Y, "n": 48, "stride": 32, "scale": 0.5, "HAS_SCALE": True, "BLOCK": 16, "num_warps": 1}


def launch(kernel: JITFunction, grid: tuple[int, ...] = (3,), **changes: Any) -> None:
    given = {**USUAL, **changes}
    args = tuple(given.pop(name) for name in ("x", "y", "n", "stride", "scale"))
    launch_module.launch(kernel, grid, args, given)


def test_the_second_launch_does_not_ask_triton(gpu, kernel):
    launch(kernel)
    launch(kernel, scale=0.25)
    launch(kernel, (5, 2), x=Y, y=X)
    assert len(kernel.found) == 1
    first, second, third = gpu.launches
    # Grid, stream, function and metadata; hooks are between them and the arguments.
    assert first[:4] == second[:4] == (3, 1, 1, 7)
    assert third[:4] == (5, 2, 1, 7)
    assert first[4:6] == second[4:6] == third[4:6]
    # Nobody is to be told of it, and the driver is not asked about an address.
    assert list(second[6:]) == [None, None, None, X.data_ptr(), Y.data_ptr(), 48, 32, 0.25, True, 16]
    assert list(third[9:11]) == [Y.data_ptr(), X.data_ptr()]


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(260)[1:]},  # 4 bytes after a multiple of 16
        {"y": torch.zeros(256, dtype=torch.float16)},
        {"stride": 1},
        {"stride": 33},
        {"stride": 1 << 40},
        {"scale": 2},
        {"scale": 1},
        {"HAS_SCALE": False},
        {"BLOCK": 32},
        {"num_warps": 2},
    ],
    ids=str,
)
def test_what_triton_compiles_anew_it_is_asked_for(gpu, kernel, changes):
    launch(kernel)
    launch(kernel, **changes)
    launch(kernel)
    launch(kernel, **changes)
    usual, changed = kernel.found
    assert usual is not changed
    assert [launched[5] for launched in gpu.launches] == [usual.packed_metadata, changed.packed_metadata] * 2


@pytest.mark.parametrize("kernel", [("n",)], indirect=True)
def test_triton_is_not_asked_about_a_new_length(gpu, kernel):
    """Lengths change with every batch, and Triton compiles nothing for them."""
    for n in (48, 1, 47, 48, 0):
        launch(kernel, n=n)
    assert len(kernel.found) == 1
    assert [launched[-5] for launched in gpu.launches] == [48, 1, 47, 48, 0]
    assert len({launched[5] for launched in gpu.launches}) == 1


@pytest.mark.parametrize("kernel", [("n",)], indirect=True)
@pytest.mark.parametrize("changes", [{"n": 1 << 31}, {"n": 1 << 63}, {"n": 47, "stride": 33}, {"n": 47, "y": Y.half()}],
                         ids=["wide", "wider", "stride", "dtype"])  # fmt: skip
def test_a_new_length_is_not_all_that_is_new(gpu, kernel, changes):
    launch(kernel)
    launch(kernel, **changes)
    launch(kernel, **changes)
    usual, changed = kernel.found
    assert [launched[5] for launched in gpu.launches] == [usual.packed_metadata, *[changed.packed_metadata] * 2]


@pytest.mark.parametrize("kernel", [("n",)], indirect=True)
def test_a_length_and_the_stride_of_another_launch(gpu, kernel):
    """No number of one stands for the other."""
    launch(kernel, n=32, stride=48)
    launch(kernel, n=48, stride=32)
    assert len(kernel.found) == 2


def test_each_device_has_kernels_of_its_own_and_the_stream_is_the_current_one(gpu, kernel):
    launch(kernel)
    gpu.device, gpu.stream = 1, 5
    launch(kernel)
    gpu.stream = 6
    launch(kernel)
    assert [launched[3] for launched in gpu.launches] == [7, 15, 16]
    one, two = kernel.found
    assert one is not two


class Cards:
    """Two of them, in place of `torch.cuda`."""

    def __init__(self) -> None:
        self.current = 0

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, where: torch.device) -> Iterator[None]:
        before, self.current = self.current, where.index
        yield
        self.current = before


def test_a_kernel_runs_where_its_tensors_are(monkeypatch):
    """The layers of a model may be on several devices, while one is the current one."""
    cards, ran = Cards(), []
    monkeypatch.setattr(torch, "get_device_module", lambda where: cards)
    monkeypatch.setattr(device, "keeps_compiled", lambda where: False)
    monkeypatch.setattr(launch_module, "_kept", {})  # what other tests have launched on a card
    device._current_device.cache_clear()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda t: ran.append((t.device.index, cards.current))

    for index in (0, 1, 0):
        launch_module.launch(Kernel(), (1,), (SimpleNamespace(device=torch.device("cuda", index)),), {})
    device._current_device.cache_clear()
    assert ran == [(0, 0), (1, 1), (0, 0)]
    assert cards.current == 0


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(gpu, kernel, monkeypatch, which):
    launch(kernel)
    hook = triton.knobs.HookChain()
    hook.add(lambda metadata: None)
    monkeypatch.setattr(triton.knobs.runtime, which, hook)
    launch(kernel)
    hook.calls.clear()
    launch(kernel)
    _, told, untold = gpu.launches
    assert told[7 if which == "launch_enter_hook" else 8] is hook
    assert told[6].get()["name"] == "_add_kernel"
    assert told[9] is X
    assert list(untold[6:9]) == [None] * 3
    assert len(kernel.found) == 1


@pytest.mark.parametrize("hook", [None, print])
def test_a_hook_as_triton_3_4_has_it(monkeypatch, hook):
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    assert launch_module._is_watched() is (hook is not None)


@jit
def _largest_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) - tl.max(tl.load(x + at), 0))


def _language() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype)]


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels are interpreted on the CPU alone")
def test_an_interpreted_kernel_leaves_triton_as_it_was(gpu, kernel):
    """The function that it calls (`tl.max`) and, of a kernel that raises, what came before."""
    before, out = _language(), torch.empty(16)
    _largest_kernel[(1,)](torch.arange(16.0), out, BLOCK=16)
    assert torch.equal(out, torch.arange(16.0) - 15)
    assert _language() == before
    with pytest.raises(Exception, match="arange"):
        _largest_kernel[(1,)](X, Y, BLOCK="nonsense")
    assert _language() == before
    launch(kernel, BLOCK=64)  # compiled: in no other test
    assert len(gpu.launches) == 1


def test_no_more_than_so_many_are_kept(gpu, kernel, monkeypatch):
    monkeypatch.setattr(launch_module, "_MOST_KEPT", 3)
    for n in range(2, 12):
        launch(kernel, n=n)
        assert len(launch_module._kept) <= 3
        assert len(launch_module._of_any_length) <= 3


def test_what_triton_does_not_return_is_not_kept(gpu):
    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constexprs: gpu.launches.append(args)

    for _ in range(2):
        launch(Interpreted())
    assert len(gpu.launches) == 2
    assert not launch_module._kept


def test_triton_is_asked_every_time_where_more_may_count(gpu, kernel, monkeypatch):
    assert not KEEPS_COMPILED(torch.device("cpu"))
    for module, name, value in (
        (launch_module, "LAUNCHES_COMPILED", False),
        (device, "keeps_compiled", lambda _: False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            launch(kernel)
            launch(kernel)
    assert len(kernel.found) == 4
    assert not launch_module._kept
