"""What comes from outside: YAML files, environment variables, and what the package may do with text and files."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from trl import TrlParser
from yaml import YAMLError

import npu_trainer_kernels
from npu_trainer_kernels import NpuKernelsArguments, NpuKernelsCallback, apply_npu_kernels, ops
from npu_trainer_kernels.support import triton
from tests.models import small_model

PACKAGE = Path(npu_trainer_kernels.__file__).parent

BAD_YAML = [
    ("use_npu_kernels: [1]", "use_npu_kernels must be true or false; got [1]"),
    ("use_npu_kernels: 1", "use_npu_kernels must be true or false; got 1"),
    ("use_npu_kernels: perhaps", "Truthy value expected: got perhaps"),
    ("use_npu_kernel: true", "Unknown arguments from config file: ['--use_npu_kernel', 'True']"),
    ("{use_npu_kernels: true, npu_kernels_strict: {}}", "npu_kernels_strict must be true or false; got {}"),
    ("{use_npu_kernels: true, npu_kernels_ops: 3}", "npu_kernels_ops must be a list of rms_norm, add_rms_norm"),
    ("{use_npu_kernels: true, npu_kernels_ops: rms_norm}", "npu_kernels_ops must be a list of rms_norm"),
    ("{use_npu_kernels: true, npu_kernels_ops: []}", "linear_logprob, one at least; got []"),
    ("{use_npu_kernels: true, npu_kernels_ops: [[1]]}", "npu_kernels_ops must be a list of rms_norm"),
    ("{use_npu_kernels: true, npu_kernels_backend: 3}", "npu_kernels_backend must be 'torch' or"),
    ("{use_npu_kernels: true, npu_kernels_backend: [torch]}", "npu_kernels_backend must be 'torch' or"),
    ("{use_npu_kernels: true, npu_kernels_backend: fast}", "backend must be one of triton, torch"),
    ("use_npu_kernels: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("- use_npu_kernels", "must contain a YAML mapping"),
]


@pytest.mark.parametrize(("text", "message"), BAD_YAML)
def test_bad_yaml_says_what_is_wrong(tmp_path, capsys, text, message):
    config = tmp_path / "run.yaml"
    config.write_text(text + "\n")
    with pytest.raises((ValueError, SystemExit, YAMLError)) as caught:
        TrlParser((NpuKernelsArguments,)).parse_args_and_config(["--config", str(config)])
    assert message in str(caught.value) + capsys.readouterr().err


def test_an_unknown_op_is_named_before_there_is_a_model():
    with pytest.raises(ValueError, match=r"npu_kernels_ops must be a list of rms_norm.*; got \['norm'\]"):
        NpuKernelsArguments(use_npu_kernels=True, npu_kernels_ops=["norm"])
    with pytest.raises(ValueError, match=r"ops must be a sequence of rms_norm.*; got \['norm'\]"):
        NpuKernelsCallback(ops=["norm"])


@pytest.mark.parametrize("value", ["fast", "rms_norm=", "rms_norm", "norm=torch", "=", "torch=rms_norm", "\u00e4\n"])
def test_backend_of_the_environment(monkeypatch, value):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", value)
    with pytest.raises(ValueError, match=r"NPU_KERNELS_BACKEND(: unknown op| must be one of)"):
        ops.rms_norm(torch.ones(2, 4))


@pytest.mark.parametrize("value", ["A100", "ascend910b4", "../../etc/passwd"])
def test_chip_of_the_environment(monkeypatch, value):
    monkeypatch.setenv("NPU_KERNELS_CHIP", value)
    monkeypatch.setattr(triton, "INTERPRETED", True)
    with pytest.raises(ValueError, match="chip must be one of Ascend910B1"):
        ops.rms_norm(torch.ones(2, 4), backend="triton")


def called(tree: ast.Module) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_nothing_is_unpickled_or_evaluated():
    """Checkpoints are loaded by transformers alone. What is compiled is a layer's own source, rewritten, and, in the
    tools of the gate, the compiler's plan of a kernel, translated."""
    forbidden = {"eval", "exec", "compile", "__import__", "torch.load", "pickle.load", "pickle.loads", "yaml.load",
                 "marshal.loads", "os.system", "joblib.load", "numpy.load", "np.load"}  # fmt: skip
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in called(ast.parse(path.read_text())) & forbidden
    }
    tool = "ascend/trace.py"
    assert found == {("patching/probe/source.py", "compile"), (tool, "compile"), (tool, "exec")}


def test_what_is_compiled_is_the_function_of_the_installed_layer():
    """Same file, lines and globals: nothing but the source of the class's own forward, with one thing exchanged."""
    model = small_model("llama")
    layer = model.model.layers[0]
    function = inspect.unwrap(type(layer).forward)  # transformers wraps the forward of its layers
    with apply_npu_kernels(model, ops=["add_rms_norm"]):
        rewritten = inspect.unwrap(type(layer).forward)
    assert rewritten is not function
    assert rewritten.__globals__ is function.__globals__
    assert rewritten.__code__.co_filename == function.__code__.co_filename
    assert Path(function.__code__.co_filename).name == "modeling_llama.py"
    assert set(rewritten.__code__.co_names) - set(function.__code__.co_names) == {"_npu_kernels_add_rms_norm"}
