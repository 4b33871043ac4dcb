"""Batches with lengths as users have them, and inputs like a trained model's: what the benchmarks feed to everybody."""

import sys
import types

import pytest
import torch
from torch.nn import functional as F

from benchmarks import cases, cli, distributed, endtoend, providers, runner, step_cases, step_clock, steps
from benchmarks.draws import Draws
from benchmarks.lengths import DISTRIBUTIONS, lengths, prompt_lengths
from npu_trainer_kernels import backends
from npu_trainer_kernels.patching import PATCHES

CPU = torch.device("cpu")
PADDED = step_cases.StepWorkload("grpo-trl", "tiny-qwen3", 8, 20, 12, lengths="exponential", group=2)
SHARED = step_cases.StepWorkload("grpo-trl", "tiny-qwen3", 4, 12, 16, lengths="exponential", lora=2)


def middles(count):
    return [(i + 0.5) / count for i in range(count)]


@pytest.mark.parametrize(("distribution", "share"), [("exponential", 0.37), ("even", 25 / 32)])
@pytest.mark.parametrize("count", [8, 104])
def test_lengths_are_the_distributions_own(distribution, share, count):
    found = lengths(distribution, middles(count), 4096)
    assert sum(found) / count / 4096 == pytest.approx(share, abs=0.005)
    assert found == sorted(found)
    assert lengths(distribution, [1 - 1e-9], 4096) == [4096]


def test_no_length_is_shorter_than_a_token_or_a_twentieth():
    assert min(lengths("exponential", middles(1000), 4096)) == round(4096 / 20)
    assert min(lengths("exponential", middles(100), 3)) == 1
    assert prompt_lengths([0.0, 1 / 3, 1 - 1e-9], 128) == [32, 64, 128]
    assert prompt_lengths([0.0, 0.5], 1) == [1, 1]


def test_an_unknown_distribution_names_the_known_ones():
    with pytest.raises(ValueError, match="exponential, even; got 'normal'"):
        lengths("normal", [0.5], 16)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_every_workload_with_padding_has_one_without(kind):
    found = step_cases.workloads(kind)
    assert {w.lengths for w in found if w.name == "grpo-trl"} == {"", *DISTRIBUTIONS}
    assert {w.lengths for w in found if w.name == "sft-trainer"} == {"", "exponential"}
    one_prompt = [w for w in found if w.lengths and w.prompt and w.group >= w.batch]
    assert {bool(w.lora) for w in one_prompt} == {True, False}
    assert {workload.lengths for workload, _, _ in distributed.plan(kind)} <= {"", *DISTRIBUTIONS}


def test_a_grpo_step_counts_what_it_was_given():
    """Four prompts with two completions each, padded on the left and on the right."""
    found = {name: endtoend.train(PADDED, name, steps=2) for name in ("plain", "flag", "flag-padded")}
    prompts, rows = ([len(ids) for ids in draw(1)] for draw in (Draws(PADDED).prompts, Draws(PADDED).rows))
    assert {row["tokens"] for row in found.values()} == {2 * sum(prompts) + sum(rows)}
    assert {row["positions"] for row in found.values()} == {8 * (max(prompts) + max(rows))}
    assert found["plain"]["live_share"] == found["plain"]["tokens"] / found["plain"]["positions"] < 1
    for name in ("flag", "flag-padded"):
        row = {**found[name], "dtype": "float32"}
        assert not endtoend.differs(row, found["plain"]), name


def test_an_adapter_is_trained_alone(tmp_path):
    clock = step_clock.Clock(CPU)
    trainer, _ = steps.build_trainer(SHARED, step_cases.VARIANTS["plain"], 1, str(tmp_path), clock)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    # All rows have one prompt.
    assert len(Draws(SHARED).prompts(0)) == 1
    assert trainer.num_generations == 4


def test_what_today_means_is_all_ops_but_one(monkeypatch):
    monkeypatch.setitem(PATCHES, steps.PACKING_OP, PATCHES["rms_norm"])
    asked = steps.kernels_of(step_cases.VARIANTS["flag-padded"]).npu_kernels_ops
    assert steps.PACKING_OP not in asked
    assert {"rms_norm", "linear_logprob"} <= set(asked) <= set(PATCHES)
    # A model keeps its own code where it would without a list.
    assert backends.keeps_plain("swiglu", CPU) is not None
    assert "swiglu" not in asked
    assert steps.kernels_of(step_cases.VARIANTS["flag"]).npu_kernels_ops is None
    assert not steps.kernels_of(step_cases.VARIANTS["plain"]).use_npu_kernels


def test_sharing_is_switched_off_where_it_is_decided(monkeypatch):
    layout = types.ModuleType("npu_trainer_kernels.patching.body.layout")
    monkeypatch.setitem(sys.modules, layout.__name__, layout)
    with pytest.raises(AttributeError, match="MIN_SAVED"):
        steps.kernels_of(step_cases.VARIANTS["flag-unshared"])
    layout.MIN_SAVED = 0.05
    assert steps.kernels_of(step_cases.VARIANTS["flag-unshared"]).npu_kernels_ops is None
    assert layout.MIN_SAVED > 1


def test_only_rows_that_begin_alike_are_run_without_sharing():
    shared = {w.name for w in step_cases.workloads("cuda") if "flag-unshared" in step_cases.variants_of(w)}
    assert shared == {"grpo-trl", "dpo-trl"}


def test_unsloth_is_run_where_grpo_trains_a_whole_model_and_an_adapter():
    found = [
        w for kind in ("cuda", "cpu") for w in step_cases.workloads(kind) if "unsloth" in step_cases.variants_of(w)
    ]
    assert [(w.batch, w.length, w.prompt) for w in found] == [
        (8, 512, 128), (16, 1024, 256), (8, 512, 128), (8, 1024, 2048), *[(8, 4096, 128)] * 3, (8, 1024, 2048),
    ]  # fmt: skip
    assert {(w.name, w.size, w.lora) for w in found} == {("grpo-trl", "qwen3-0.6b", 0), ("grpo-trl", "qwen3-4b", 16)}


def _tiles_with_a_gradient(x, weight, ids):
    """The share of tiles of 128 x 128 logits, sorted by their means, with a gradient above 2**-12."""
    logits = x @ weight.T
    gradient = logits.softmax(-1)
    gradient[torch.arange(len(ids)), ids] -= 1
    gradient = gradient[:, logits.mean(0).argsort()].abs()
    columns = gradient.shape[1] // 128 * 128
    tiles = gradient[:, :columns].reshape(-1, 128, columns // 128, 128)
    return (tiles >= 2.0**-12).any(-1).any(1).float().mean().item()


def test_peaked_inputs_are_like_a_trained_models():
    torch.manual_seed(0)
    rows, vocabulary, hidden = 256, 128256, 128
    x, weight = torch.randn(rows, hidden), torch.randn(vocabulary, hidden) * hidden**-0.5
    flat = _tiles_with_a_gradient(x, weight, torch.randint(vocabulary, (rows,)))
    ids = cases.peak(x, weight)
    loss = F.cross_entropy(x @ weight.T, ids, reduction="none")
    assert 1.5 < loss.mean() < 2.5
    assert 0.4 < (loss < -torch.tensor(0.9).log()).float().mean() < 0.6
    assert 0.4 < flat < 0.7
    assert _tiles_with_a_gradient(x, weight, ids) < 0.2


@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_logprob"])
def test_peaked_rows_have_their_own_name_and_inputs(op):
    sizes = {"BT": 16, "H": 8, "V": 31}
    flat, peaked = cases.OpCase(op, sizes, "float32"), cases.OpCase(op, sizes, "float32", peaked=True)
    assert peaked.shape == flat.shape + " peaked"
    a, b = (runner._inputs(case, CPU, 0).tensors for case in (flat, peaked))
    assert (b["x"][:, 0] == 1).all()
    assert not torch.equal(a["weight"], b["weight"])
    for kind in ("cpu", "cuda"):
        assert any(case.peaked for case in cases.table(kind))


def test_a_package_is_imported_anew_with_its_settings(tmp_path, monkeypatch):
    (tmp_path / "reads_it.py").write_text("import os\nfound = os.environ.get('A_SETTING', 'none')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("A_SETTING", raising=False)
    import reads_it

    assert providers._imported_with("reads_it", A_SETTING="1").found == "1"
    assert reads_it.found == "none"
    assert sys.modules["reads_it"] is reads_it
    del sys.modules["reads_it"]


def test_the_command_knows_the_rows(capsys):
    assert cli.main(["--list", "--device", "cuda", "--only", "exponential*flag-padded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "end-to-end/grpo-trl/qwen3-0.6b 8x(..128+..4096 exponential), 2 a prompt/bfloat16/flag-padded" in lines
    assert "end-to-end/grpo-trl/qwen3-4b 8x(2048+..1024 exponential), 8 a prompt lora 16/bfloat16/flag-padded" in lines
