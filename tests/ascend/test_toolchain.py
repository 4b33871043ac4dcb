import os
import subprocess
import sys

import pytest

from npu_trainer_kernels.ascend import toolchain
from npu_trainer_kernels.support.cache import CACHE_VARIABLE
from npu_trainer_kernels.support.triton import MissingDependencyError


def test_a_missing_host_tool_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in toolchain.HOST_TOOLS:
        with pytest.raises(MissingDependencyError) as error:
            toolchain.host_tool(name)
        assert name in str(error.value)
        assert "apt-get install mlir-19-tools llvm-19 libmlir-19-dev gcc" in str(error.value)


@pytest.mark.parametrize("absent", ["triton", "ascendnpuir"])
def test_a_missing_package_says_how_to_install_it(monkeypatch, absent):
    find = toolchain.importlib.util.find_spec
    monkeypatch.setattr(
        toolchain.importlib.util,
        "find_spec",
        lambda name, *rest: None if name.startswith(absent) else find(name, *rest),
    )
    toolchain.ascend_compiler.cache_clear()
    with pytest.raises(MissingDependencyError) as error:
        toolchain.require_all()
    assert "pip install '.[ascend]'" in str(error.value)


def test_another_triton_is_not_triton_ascend(monkeypatch):
    find = toolchain.importlib.util.find_spec
    monkeypatch.setattr(
        toolchain.importlib.util, "find_spec", lambda name, *rest: None if "ascend" in name else find(name, *rest)
    )
    toolchain.ascend_compiler.cache_clear()
    with pytest.raises(MissingDependencyError, match="triton-ascend"):
        toolchain.ascend_compiler()


def test_a_failed_tool_is_named_with_its_diagnosis():
    script = "import sys; print('noise'); print('error: too small', file=sys.stderr); sys.exit(3)"
    with pytest.raises(toolchain.ToolchainError) as error:
        toolchain.invoke("my_kernel", "planning", [sys.executable, "-c", script])
    assert (error.value.kernel, error.value.stage) == ("my_kernel", "planning")
    assert error.value.diagnostics == ("error: too small",)
    assert str(error.value).startswith("my_kernel: planning failed")


def test_the_cache_makes_a_file_once_and_whole(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    made = []

    def produce(path):
        made.append(path)
        path.write_text("content")

    first, second = toolchain.cached("kind/name", produce), toolchain.cached("kind/name", produce)
    assert first == second == tmp_path / "kind" / "name"
    assert first.read_text() == "content"
    assert len(made) == 1
    assert made[0].parent != first.parent
    assert os.listdir(tmp_path / "kind") == ["name"]


def test_a_failed_attempt_leaves_nothing_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))

    def produce(path):
        path.write_text("half")
        raise toolchain.ToolchainError("k", "s", [])

    with pytest.raises(toolchain.ToolchainError):
        toolchain.cached("kind/name", produce)
    assert os.listdir(tmp_path / "kind") == []


def test_importing_the_toolchain_imports_no_triton():
    script = "import npu_trainer_kernels.ascend.toolchain, sys; assert not any('triton' == m for m in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
