"""Kernels compiled before the first step: which ones, what is left untouched, and that lengths add none.

On an accelerator (NPU_KERNELS_TEST_DEVICE) its kernels are recorded, and `test_recorded_is_what_a_real_step_launches`
and `test_the_first_step_compiles_nothing` compile them.
"""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, Trainer
from transformers.models.qwen3_moe import modeling_qwen3_moe

from npu_trainer_kernels import NpuKernelsArguments, NpuKernelsCallback, apply_npu_kernels, device, tiling
from npu_trainer_kernels.ops import launch as launch_module
from npu_trainer_kernels.ops import swiglu
from npu_trainer_kernels.ops.experts import grouped
from npu_trainer_kernels.support import triton
from npu_trainer_kernels.training import warmup
from tests.conftest import DEVICE
from tests.models import FAMILIES, small_model
from tests.test_callback import make_trainer

# A kernel's name, and the dtypes and constants that it is compiled for.
Variant = tuple[str, tuple[torch.dtype, ...], tuple[tuple[str, Any], ...]]
EVERY = (
    "rms_norm", "add_rms_norm", "embedding", "swiglu", "moe_experts", "rope", "linear_cross_entropy", "linear_logprob",
)  # fmt: skip


def specializations(family: str, shapes: list[tuple[int, int]]) -> dict[str, list[list[str]]]:
    """What Triton would look compiled kernels up by, by kind of device and shape; in a process that compiles them."""
    text = ",".join(f"{rows}x{length}" for rows, length in shapes)
    done = subprocess.run(
        [sys.executable, "-m", "tests.specializations", family, text],
        capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full("16")
@pytest.mark.parametrize("others", [2, 16])
def test_no_kernel_is_compiled_anew_for_another_length(others):
    """Lengths that are one, multiples of 16, and multiples of nothing: what Triton would specialise on."""
    generator = random.Random(0)
    shapes = [(2, 128)] + [(generator.randint(1, 5), generator.randint(1, 300)) for _ in range(others)]
    shapes += [(1, 1), (1, 16), (16, 1)]
    for kind, keys in specializations("qwen3", shapes).items():
        assert len(keys[0]) > 8, kind
        assert set().union(*keys) == set(keys[0]), kind


def model_there(family: str, **overrides: Any) -> PreTrainedModel:
    """A small model where the tests run."""
    return small_model(family, **overrides).to(DEVICE)


def record(family: str = "llama", ops: tuple[str, ...] = EVERY, **options: Any) -> warmup.RecordedLaunches:
    model = model_there(family)
    with apply_npu_kernels(model, ops=ops, backend="triton") as handle:
        return warmup.record(handle, model, rows=2, **options)


def test_backward_is_recorded_in_the_thread_that_records(monkeypatch):
    """An accelerator's backward has a thread of its own otherwise, whose launches would be real ones."""
    run, seen = warmup._run, []

    def spy(*args):
        seen.append(torch.autograd.is_multithreading_enabled())
        run(*args)

    monkeypatch.setattr(warmup, "_run", spy)
    assert record().problem is None
    assert seen == [False]
    assert torch.autograd.is_multithreading_enabled()


@pytest.fixture
def torch_2_11_on_cuda(monkeypatch):
    """Sums over chunks as on CUDA, on every device; and torch 2.11, which cannot add such products of fake tensors."""
    monkeypatch.setattr(device, "has_fp32_output_product", lambda where: True)
    dispatch = FakeTensorMode.__torch_dispatch__

    def of_torch_2_11(mode, function, *rest):
        if function is torch.ops.aten.addmm.dtype_out:
            raise TypeError("unsupported operand type(s) for *: 'torch.dtype' and 'FakeTensor'")
        return dispatch(mode, function, *rest)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", of_torch_2_11)


def test_both_forms_of_the_heads_kernel_are_recorded(monkeypatch, torch_2_11_on_cuda):
    """A long batch takes several chunks of logits, and the first of them lies in two matrices."""
    spec, tokens = device.DeviceSpec("cuda", "a card", 132, 256 << 10, 80 << 30), warmup.ROWS * warmup.LENGTH
    for vocab, hidden in ((128256, 2048), (128256, 4096), (151936, 1024), (151936, 3584)):
        plan = tiling.borrowing_chunks(tokens, vocab, hidden, 2, 2, spec)
        assert plan is not None
        assert len(plan.stops) > 1
    # The same at the sizes of a small model.
    monkeypatch.setattr(
        tiling, "borrowing_chunks", lambda n, *args: tiling.BorrowingChunks((64, n), 128) if n == tokens else None
    )
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 16, 3))
    model = model_there("llama").bfloat16()
    with apply_npu_kernels(model, ops=EVERY, backend="triton") as handle:
        found = warmup.record(handle, model, warmup.ROWS)
    assert found.problem is None
    fused = [dict(launch.constexprs) for launch in found.launches if launch.name == "head row fused"]
    assert {constants["HAS_SECOND"] for constants in fused} == {True, False}
    assert "norms backward" in found.names


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_of_a_step_are_recorded_and_not_launched(family):
    found = record(family)
    assert found.problem is None
    # Cohere's norms are layer norms.
    expected = {"embedding", "head"} if family == "cohere" else {"norms", "embedding", "head"}
    expected |= {"experts"} if family in ("qwen3-moe", "gpt-oss") else set()
    assert {name.split()[0] for name in found.names} >= expected


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_grouped_products_that_torch_does_not_know_without_numbers_are_left_out(monkeypatch, family):
    """Those of fp32: on a card there are some, and the function that gives a fake one its shape refuses them."""
    expected = record(family).names
    monkeypatch.setattr(device, "grouped_product_by", lambda where: "torch")
    monkeypatch.setattr(grouped, "unavailable", lambda *args: None)
    found = record(family)
    assert found.problem is None
    assert found.names == expected


def test_what_follows_counts_of_experts_is_recorded_too(monkeypatch):
    """As transformers 5.17 balances them: how many counts there are would depend on ids, were their kinds not said."""
    expected, counts = record("qwen3-moe").names, []

    def balance(gates, experts, *rest):
        counts.extend(torch.bincount(gate.topk(2).indices.reshape(-1), minlength=experts) for gate in gates)
        return sum(count.float() @ gate.softmax(-1).sum(0) for count, gate in zip(counts, gates, strict=True))

    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", balance)
    found = record("qwen3-moe")
    assert found.problem is None
    assert [count.shape for count in counts] == [(4,)] * 2
    assert found.names == expected
    assert "norms backward" in expected


@contextlib.contextmanager
def launched() -> Iterator[set[Variant]]:
    """What is launched inside the `with` block."""
    found = set()

    def spy(kernel, grid, args, constexprs):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        # Recorded is a dtype: Triton compiles another kernel for memory that is not aligned.
        assert all(t.data_ptr() % 16 == 0 for t in tensors), kernel.__name__
        found.add((kernel.__name__, tuple(t.dtype for t in tensors), tuple(constexprs.items())))
        launch_module._run(kernel, grid, args, constexprs)

    # The launcher is this thread's own, and an accelerator's backward has another.
    with launch_module.use_launcher(spy), torch.autograd.set_multithreading_enabled(False):
        yield found


def variants(recorded: warmup.RecordedLaunches) -> set[Variant]:
    """The same of what was recorded."""
    return {
        (launch.kernel.__name__, tuple(a for a in launch.args if isinstance(a, torch.dtype)), launch.constexprs)
        for launch in recorded.launches
    }


@pytest.mark.full("gemma2")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_recorded_is_what_a_real_step_launches(family):
    """The same kernels with the same dtypes and constants, forward and backward, as training on numbers."""
    model = model_there(family)
    with apply_npu_kernels(model, ops=EVERY, backend="triton") as handle:
        ahead = warmup.record(handle, model, rows=2, length=7)
        ids = torch.randint(3, 300, (2, 7), device=DEVICE)
        with launched() as real:
            model(input_ids=ids, labels=ids).loss.backward()
    assert ahead.problem is None
    assert variants(ahead) == real


def test_bfloat16_under_autocast_has_kernels_of_its_own():
    plain = {launch.args for launch in record().launches}
    autocast = functools.partial(torch.autocast, torch.device(DEVICE).type, torch.bfloat16)
    mixed = {launch.args for launch in record(context=autocast).launches}
    assert any(torch.bfloat16 in args for args in mixed)
    assert not any(torch.bfloat16 in args for args in plain)


def random_states() -> list[torch.Tensor]:
    """Of the CPU's generator, and of the accelerator's."""
    accelerators = [] if DEVICE == "cpu" else [torch.get_device_module(DEVICE).get_rng_state(DEVICE)]
    return [torch.get_rng_state(), *accelerators]


def test_nothing_of_the_run_is_touched():
    model = model_there("llama", attention_dropout=0.1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with apply_npu_kernels(model, ops=EVERY, backend="triton") as handle:
        before, learned = random_states(), handle.settings.learned
        warmup.record(handle, model, rows=2)
        assert all(torch.equal(a, b) for a, b in zip(random_states(), before, strict=True))
        assert handle.tokens == 0
        assert handle.settings.learned is learned
        assert handle.settings.compacts
    assert all(p.grad is None and type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_gradient_checkpointing_is_recorded_too():
    model = model_there("llama")
    model.gradient_checkpointing_enable()
    with apply_npu_kernels(model, ops=EVERY, backend="triton") as handle:
        found = warmup.record(handle, model, rows=2)
    assert found.problem is None
    assert {"norms backward", "swiglu backward"} <= set(found.names)


def test_what_cannot_run_without_numbers_is_said_and_the_rest_kept():
    found = record("qwen3-moe", EVERY[:4])  # its own experts are chosen by value
    assert "norms forward" in found.names
    assert "nonzero" in found.problem


@pytest.mark.trl_head
def test_trl_scores_through_the_head_that_it_gave_the_model():
    from trl.trainer.utils import add_fused_lm_head

    model = model_there("llama")
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    with apply_npu_kernels(model, ops=EVERY, backend="triton") as handle:
        found = warmup.record(handle, model, rows=2, trl=True)
    assert found.problem is None
    flags = [dict(launch.constexprs) for launch in found.launches if launch.name == "head row statistics"]
    assert any(flag["HAS_ENTROPY"] and not flag["IS_IDENTITY"] for flag in flags)


def test_what_follows_sums_in_backward_is_recorded_too(monkeypatch, torch_2_11_on_cuda):
    """A head of TRL's without a plan sums over chunks in backward, and the layers' backward comes after it."""
    from trl.trainer.utils import add_fused_lm_head

    tokens, sums = warmup.ROWS * warmup.LENGTH, []
    monkeypatch.setattr(tiling, "head_chunk", lambda *args: tokens // 4)
    monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: None)
    addmm = torch.addmm

    def spy(*args, **kwargs):
        sums.append("out_dtype" in kwargs and torch._C._current_graph_task_id() != -1)
        return addmm(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", spy)
    model = model_there("llama").bfloat16()
    add_fused_lm_head(model)
    with apply_npu_kernels(model, ops=EVERY, backend="triton") as handle:
        found = warmup.record(handle, model, warmup.ROWS, trl=True)
    assert any(sums), "nothing was summed in backward"
    assert found.problem is None
    assert set(found.names) >= {"head row gradient", "norms backward", "swiglu backward"}
    # On a GPU another kernel adds up the embedding's rows.
    assert len([name for name in found.names if name.startswith("embedding")]) > 1


# ------------------------------------------------------------------------------------------------------------ compiling
class Kernel:
    """Stands for a `JITFunction`."""

    __name__ = "_forward_kernel"
    fn = swiglu
    cache_key = ""

    def __init__(self, errors=()):
        self.errors, self.threads = list(errors), []

    def warmup(self, *args, grid, **constexprs):
        self.threads.append(threading.get_ident())
        if self.errors:
            raise self.errors.pop(0)


def compile_these(*kernels):
    return warmup.compile_all([warmup.Launch(k, (1,), (torch.float32, 5), ()) for k in kernels], torch.device("cpu"))


def test_a_kernel_that_cannot_be_compiled_is_reported_and_the_others_are_compiled():
    good, bad = Kernel(), Kernel([ValueError("no such layout")])
    _, problems = compile_these(bad, good)
    assert len(problems) == 1
    assert "_forward_kernel(" in problems[0]
    assert "ValueError: no such layout" in problems[0]
    assert len(good.threads) == 1


def test_the_parsers_trouble_with_threads_is_tried_again_alone():
    kernel = Kernel([SystemError("AST constructor recursion depth mismatch")])
    _, problems = compile_these(kernel)
    assert problems == []
    assert len(kernel.threads) == 2
    assert kernel.threads[1] == threading.get_ident()


class Launchers:
    """In place of Triton's driver where launchers are built. `built` has the kernels' names; those after the first wait
    for each other, two at a time, and while the first is built nothing else is."""

    def __init__(self, monkeypatch, errors=()):
        self.built, self.errors = [], dict(errors)
        self.two, self.another = threading.Barrier(2, timeout=60), threading.Event()
        active = types.SimpleNamespace(launcher_cls=self)
        driver = types.SimpleNamespace(runtime=types.SimpleNamespace(driver=types.SimpleNamespace(active=active)))
        monkeypatch.setattr(launch_module, "triton", driver)
        monkeypatch.setattr(device, "builds_launchers", lambda where: True)
        monkeypatch.setattr(warmup.os, "cpu_count", lambda: 4)

    def __call__(self, src, metadata):
        assert src == "the source"
        alone = not self.built
        self.built.append(metadata.name)
        if metadata.name in self.errors:
            raise self.errors[metadata.name]
        if alone:
            assert not self.another.wait(0.5), "another one was begun meanwhile"
        else:
            self.another.set()
            self.two.wait()


class Launched(Kernel):
    """A kernel that is compiled to something with a launcher to build."""

    def __init__(self, name, errors=()):
        super().__init__(errors)
        self.compiled = types.SimpleNamespace(src="the source", metadata=types.SimpleNamespace(name=name))

    def warmup(self, *args, grid, **constexprs):
        super().warmup(*args, grid=grid, **constexprs)
        return self.compiled


def test_launchers_are_built_ahead_several_at_once_after_the_first(monkeypatch):
    launchers = Launchers(monkeypatch)
    _, problems = compile_these(*map(Launched, "abcde"))
    assert problems == []
    assert launchers.built[0] == "a"
    assert sorted(launchers.built) == list("abcde")


def test_of_a_kernel_that_cannot_be_compiled_no_launcher_is_built(monkeypatch):
    launchers = Launchers(monkeypatch)
    _, problems = compile_these(Launched("a", [ValueError("no such layout")]), Launched("b"))
    assert launchers.built == ["b"]
    assert len(problems) == 1


def test_where_no_launcher_can_be_built_that_is_said_once(monkeypatch):
    launchers = Launchers(monkeypatch, {name: RuntimeError("Failed to find C++ compiler") for name in "abc"})
    _, problems = compile_these(*map(Launched, "abc"))
    assert launchers.built == ["a"]
    assert problems == ["the launcher of kernel a: RuntimeError: Failed to find C++ compiler"]


def test_a_launcher_that_cannot_be_built_does_not_stop_the_others(monkeypatch):
    launchers = Launchers(monkeypatch, {"b": RuntimeError("no such type")})
    _, problems = compile_these(*map(Launched, "abcd"))
    assert sorted(launchers.built) == list("abcd")
    assert problems == ["the launcher of kernel b: RuntimeError: no such type"]


def test_launchers_are_built_on_npus_alone():
    assert not device.builds_launchers(torch.device("cpu"))
    assert not device.builds_launchers(torch.device("cuda"))


# --------------------------------------------------------------------------------------------------------- the callback
def trainer_there(tmp_path: Path, callback: NpuKernelsCallback, **options: Any) -> Trainer:
    """A Trainer where the tests run."""
    return make_trainer(tmp_path, callbacks=[callback], use_cpu=DEVICE == "cpu", **options)


class Ahead:
    """In place of the compiler, and on a CPU of the question whether there is one. `found` has what was recorded."""

    def __init__(self, monkeypatch, problem=None):
        self.found, self.compiled = [], []
        self.problem = problem
        self.record = warmup.record
        if DEVICE == "cpu":
            monkeypatch.setattr(warmup, "unsupported", lambda model: None)
        monkeypatch.setattr(warmup, "record", self.recorded)
        monkeypatch.setattr(warmup, "compile_all", self.compile_all)

    def recorded(self, *args, **kwargs):
        found = self.record(*args, **kwargs)
        assert found.problem is None
        self.found.append(found)
        return warmup.RecordedLaunches([warmup.Launch(Kernel(), (1,), (torch.float32, n), ()) for n in range(2)])

    def compile_all(self, launches, where):
        self.compiled.append(len(launches))
        return 1.5, [] if self.problem is None else [self.problem]


def test_training_says_what_is_compiled_before_the_report(tmp_path, monkeypatch, capsys):
    ahead = Ahead(monkeypatch, "kernel k(): it is too large")
    trainer_there(tmp_path, NpuKernelsCallback(), max_steps=1).train()
    lines = capsys.readouterr().out.splitlines()
    assert ahead.compiled == [2]
    line = "NPU kernels: compiling 2 kernels for this run (swiglu forward) ... 1.5 s"
    (report,) = (i for i, each in enumerate(lines) if each.startswith("NPU kernels on "))
    assert lines.index(line) < report
    assert any("could not be compiled ahead: kernel k(): it is too large" in each for each in lines)


def test_without_warm_up_nothing_is_compiled_ahead(tmp_path, monkeypatch):
    ahead = Ahead(monkeypatch)
    arguments = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_warm_up=False)
    trainer_there(tmp_path, *arguments.callbacks(), max_steps=1).train()
    assert ahead.compiled == []


def test_warm_up_changes_no_bit_of_the_training(tmp_path, monkeypatch):
    def losses(warm_up: bool) -> list[float]:
        model = small_model("llama", attention_dropout=0.1)
        trainer = trainer_there(tmp_path, NpuKernelsCallback(warm_up=warm_up), model=model)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    without = losses(False)
    ahead = Ahead(monkeypatch)
    assert losses(True) == without
    # A model on a CPU has torch's kernels.
    assert [bool(found.launches) for found in ahead.found] == [DEVICE != "cpu"]


@pytest.mark.trl_head
@pytest.mark.parametrize(
    "options",
    [{}, {"num_iterations": 2, "beta": 0.1}, {"entropy_coef": 0.1},
     {"loss_type": "sapo", "importance_sampling_level": "sequence"}],
    ids=str,
)  # fmt: skip
def test_the_head_of_a_grpo_run_is_recorded_with_the_runs_own_loss(tmp_path, monkeypatch, options):
    from npu_trainer_kernels import GRPOTrainer
    from tests.training.test_grpo import train

    ahead = Ahead(monkeypatch)
    kernels = NpuKernelsArguments(
        use_npu_kernels=True, npu_kernels_ops=["linear_logprob"], npu_kernels_backend="linear_logprob=triton"
    )
    # Completions of 7 tokens: 14 in a batch, no multiple of 4.
    size = {"per_device_train_batch_size": 2, "num_generations": 2, "max_steps": 1, "use_cpu": DEVICE == "cpu"}
    with launched() as real:
        train(GRPOTrainer, tmp_path, npu_kernels=kernels, **size, **options)
    (found,) = ahead.found
    assert "_row_gradient_kernel" in {name for name, *_ in real}
    assert ("_token_kernel" in {name for name, *_ in real}) == ("entropy_coef" not in options)
    # What backward makes of the plan depends on numbers.
    assert {name for name, *_ in real - variants(found)} <= {"_scale_kernel"}


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.5}, {"beta": 1.0, "temperature": 2.0, "teacher": "gemma2"}, {"beta": 0.0, "bf16": True},
     {"beta": 0.5, "gradient_checkpointing": True}],
    ids=str,
)  # fmt: skip
def test_a_divergence_is_recorded_with_the_runs_own_loss(tmp_path, monkeypatch, options):
    from tests.training.test_distillation import served, trained

    ahead = Ahead(monkeypatch)
    kernels = NpuKernelsCallback(ops=["linear_logprob", "rms_norm"], backend="triton", audit="off")
    with launched() as real:
        report = served(trained(tmp_path, [kernels], steps=1, **options))
    (found,) = ahead.found
    assert "_row_divergence_kernel" in {name for name, *_ in real}
    assert not real - variants(found)
    assert report.ran["linear_divergence"] == 1
    assert not report.declined


def test_rehearsing_a_divergence_touches_nothing_of_the_run(tmp_path, monkeypatch):
    """No divergence is counted before the first batch, which is compared; and padding is left out of that one."""
    from tests.training.test_distillation import compare, served, trained

    def run(folder, warm_up):
        return trained(tmp_path / folder, [NpuKernelsCallback(warm_up=warm_up)], steps=2, beta=0.5)

    plain = run("plain", False)
    ahead = Ahead(monkeypatch)
    ours = run("ahead", True)
    assert len(ahead.found) == 1
    compare(plain, ours)
    for report in (served(plain), served(ours)):
        assert (report.ran["linear_divergence"], report.ran["varlen_attention"]) == (2, 2)
        assert len(report.audits) == 1
        (teacher,) = report.beside.values()
        assert teacher.ran["varlen_attention"] == 2
        assert not [*report.declined, *teacher.declined]
    assert "_get_last_hidden_state" not in vars(ours)


def test_it_is_left_out_where_it_cannot_work(monkeypatch):
    model = small_model("llama")  # on the CPU, wherever the tests run
    assert warmup.unsupported(model) == "on a CPU nothing is compiled"
    assert warmup.unsupported(model.to("meta")) == (
        "there is no Triton that compiles" if triton.INTERPRETED else "the parameters are sharded"
    )
    monkeypatch.setattr(triton, "INTERPRETED", False)
    assert warmup.unsupported(model) == "the parameters are sharded"


def test_it_is_left_out_where_rows_are_spread_over_ranks(monkeypatch):
    """No rank is waited for, and a step on fake tensors asks none."""
    model = small_model("llama", attn_implementation="sdpa")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "other ranks" not in (warmup.unsupported(model) or "")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    assert warmup.unsupported(model) == "its attention may ask other ranks for their part of a row"


def compiled_kernels() -> int:
    """Variants in the memory of Triton's kernels."""
    modules = [module for name, module in sys.modules.items() if name.startswith("npu_trainer_kernels.ops.")]
    kernels = [v for module in modules for name, v in vars(module).items() if name.endswith("_kernel")]
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_compiles_nothing(dtype):
    """On an accelerator: after the warm-up the kernels of a step are there, at this length and at others."""
    model = model_there("qwen3", head_dim=16, hidden_size=64, intermediate_size=96).to(dtype)
    assert warmup.unsupported(model) is None
    with apply_npu_kernels(model, strict=True) as handle:
        found = warmup.record(handle, model, rows=2)
        assert found.problem is None
        _, problems = warmup.compile_all(found.launches, torch.device(DEVICE))
        assert problems == []
        before = compiled_kernels()
        assert before > 0
        # Not of a single token: the strides of one do not tell in which order its heads lie.
        for rows, length in ((2, 128), (1, 2), (3, 77), (4, 64)):
            ids = torch.randint(3, 300, (rows, length), device=DEVICE)
            model(input_ids=ids, labels=ids).loss.backward()
        assert compiled_kernels() == before
