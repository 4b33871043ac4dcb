"""What `torch.compile` makes of the ops: heads keep their kernels, others become plain PyTorch; a name is checked."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.ops import _launch
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.workloads import ModelShapes, Workload, of_model
from tests.conftest import DEVICE
from tests.models import small_model

SHAPES = ModelShapes(hidden=16, intermediate=24, vocabulary=40, heads=2, kv_heads=1, head_dim=8)
WORKLOADS = of_model(SHAPES, 8, "float32")
HEADS = {"linear_cross_entropy", "linear_logprob", "fused_linear_grpo_loss"}

every_op = pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.op)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """The files of `ops/` whose kernels are launched in forward inside the `with` block."""
    files = set()

    def spy(kernel, grid, args, constexprs):
        files.add(kernel.fn.__module__.rpartition(".")[2])
        _launch._run(kernel, grid, args, constexprs)

    with _launch.use_launcher(spy):
        yield files


def launched(work: Workload, backend: str | None) -> set[str]:
    """The same of a compiled call of the op."""
    inputs = work.inputs(torch.device(DEVICE))
    with launches() as files:
        torch.compile(work.ours(backend), backend="aot_eager")(inputs.tensors)
    return files


@every_op
@pytest.mark.parametrize("backend", ["tritn", "rmsnorm=torch"])
def test_a_wrong_name_is_refused_inside_a_graph(work, backend):
    with pytest.raises(ValueError, match=r"backend must be one of triton|unknown op 'rmsnorm'"):
        launched(work, backend)


@every_op
def test_a_wrong_name_in_the_environment_is_refused_inside_a_graph(work, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "tritn")
    with pytest.raises(ValueError, match=r"backend must be one of triton.*; got 'tritn'"):
        launched(work, None)


@every_op
def test_heads_alone_keep_their_kernels(work):
    assert bool(launched(work, "triton")) == (work.op in HEADS)


def test_of_a_compiled_model_trls_head_keeps_its_kernels():
    from trl.trainer.utils import add_fused_lm_head

    model = small_model("llama").to(DEVICE)
    add_fused_lm_head(model)
    ids = torch.randint(3, 300, (2, 7), device=DEVICE)
    with apply_npu_kernels(model, ops=list(PATCHES), backend="triton"), launches() as files:
        compiled = torch.compile(model, backend="aot_eager")
        compiled(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    assert files
    assert all(file.startswith("_head") for file in files), files


def test_a_compiled_model_forms_its_own_logits():
    model = small_model("llama").to(DEVICE)
    ids = torch.randint(3, 300, (2, 7), device=DEVICE)
    with apply_npu_kernels(model, ops=list(PATCHES), backend="triton"), launches() as files:
        out = torch.compile(model, backend="aot_eager")(input_ids=ids, labels=ids)
        assert type(out.logits) is torch.Tensor
        out.loss.backward()
    assert not files
