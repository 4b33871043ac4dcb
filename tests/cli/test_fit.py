"""`npu-kernels fit` and what it stands on: the ledger, the step, the search.

What predictions are held to is measured: the allocator's peaks of committed runs, and what the same ledger counts when
the real Trainer trains a real model.
"""

import gc
import importlib
import inspect
import json
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks import fit_check, step_cases
from benchmarks.models import MODELS
from benchmarks.results import read
from npu_trainer_kernels import device, fit
from npu_trainer_kernels.capture import Nothing, Watch, graph
from npu_trainer_kernels.capture.tape import Tape
from npu_trainer_kernels.cli import _fit, main
from npu_trainer_kernels.cli._fit import advice
from npu_trainer_kernels.fit import (
    PARTS,
    SHARDINGS,
    TRAINERS,
    VARIANTS,
    Prediction,
    Setup,
    _rollouts,
    _step,
    largest_batch,
    most_tried,
    predict,
)
from npu_trainer_kernels.fit._ledger import Ledger
from npu_trainer_kernels.ops import gated_delta_rule, linear_divergence
from npu_trainer_kernels.patching import PATCHES, apply_npu_kernels
from npu_trainer_kernels.patching.bodies import body_capture
from npu_trainer_kernels.patching.body import padding
from npu_trainer_kernels.rollouts import completions, serve_rollouts
from tests.models import HYBRIDS, SMALL

RESULTS = Path(fit_check.__file__).parent / "results"
MIB, GIB = 1 << 20, 1 << 30
ALLOWED = 0.05
# Of one device's steps, without the 64 MiB of cuBLAS, and without what its allocator rounds up.
ALLOWED_ALONE = 0.01
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 4096,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
SETUP = Setup("trainer", 4, 256)


def config(**changes):
    return transformers.LlamaConfig(**{k: v for k, v in {**CONFIG, **changes}.items() if k != "model_type"})


def numbers(**changes) -> int:
    """Of a model's parameters, counted on a real one."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(**changes))
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def plain():
    return predict(config(), SETUP)


# ---------------------------------------------------------------------------------------------------------------------
# The ledger
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_born_and_dies_is_counted():
    with Ledger(vocabulary=97) as ledger:
        kept = torch.empty(1000)
        passing = torch.empty(3, 97)
        view = kept[10:]  # no memory of its own
        assert ledger.alive == dict.fromkeys(PARTS, 0) | {"activations": 4096, "head": 1536}
        del passing
        assert (ledger.total, ledger.blocks) == (4096, 1)
        del kept
        assert ledger.total == 4096  # the view keeps the storage
        del view
    assert (ledger.total, ledger.blocks, ledger.peak_bytes) == (0, 0, 5632)


def test_a_storage_that_changes_its_part_is_counted_once():
    with Ledger(vocabulary=97) as ledger:
        tensor = torch.empty(1000)
        ledger.belongs(tensor, "gradients", share=0.5)
        assert ledger.alive == dict.fromkeys(PARTS, 0) | {"gradients": 2048}
        assert ledger.total == 2048
        other = torch.empty(10)
    with pytest.raises(ValueError, match=r"a tensor of shape \[7\] was not born under this ledger"):
        ledger.belongs(torch.empty(7), "gradients")
    del tensor, other
    assert ledger.total == 0


def test_backward_frees_what_it_has_used():
    with Ledger(vocabulary=97) as ledger:
        weight = torch.randn(64, 64, requires_grad=True)
        out = torch.randn(32, 64)
        for _ in range(4):
            out = (out @ weight).relu()
        out.sum().backward()
        del out
    gc.collect()
    assert ledger.total == 2 * 64 * 64 * 4  # the weight and its gradient
    # What goes into four products, and the last result; the weight, and at most a gradient, another one and their sum.
    results, weights = 5 * 32 * 64 * 4, 64 * 64 * 4
    assert results + weights <= ledger.peak_bytes <= results + 4 * weights + 4 * 512


# ---------------------------------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------------------------------


def test_what_lasts_is_exact_and_the_parts_are_the_whole(plain):
    assert sum(plain.parts.values()) == plain.peak_bytes
    assert tuple(plain.parts) == PARTS
    # bf16, and two moments of it. Each tensor is a multiple of 512 bytes; buffers and counts of steps are small.
    weights = 2 * numbers()
    assert 0 <= plain.parts["weights"] - weights <= 4 * 512
    assert 0 <= plain.parts["optimiser"] - 2 * weights <= 64 * 512


def test_all_gradients_are_there_at_the_end():
    # Of one short row the gradients are the most.
    found = predict(config(hidden_size=1024, num_hidden_layers=8, vocab_size=64), replace(SETUP, batch=1, length=8))
    gradients = 2 * numbers(hidden_size=1024, num_hidden_layers=8, vocab_size=64)
    assert found.parts["gradients"] == pytest.approx(gradients, rel=0.01)


def test_every_storage_dies_but_weights_and_state(monkeypatch):
    ledgers = []
    original = Ledger.__init__
    monkeypatch.setattr(Ledger, "__init__", lambda self, *args: (original(self, *args), ledgers.append(self))[0])
    kept = []

    def left(variant: str) -> int:
        predict(config(), replace(SETUP, variant=variant))
        gc.collect()
        return ledgers[-1].total

    assert [left(variant) for variant in VARIANTS] == [0] * len(VARIANTS)
    # What somebody keeps is seen.
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: kept.append(linear(*args)) or kept[-1])
    assert left("plain") > 0


def test_layers_add_up():
    peaks = [predict(config(num_hidden_layers=count), SETUP).peak_bytes for count in (2, 3, 4)]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


def test_what_is_switched_on_takes_less(plain):
    def peak(**changes) -> int:
        return predict(config(), replace(SETUP, **changes)).peak_bytes

    assert peak(variant="kernels") < plain.peak_bytes
    assert peak(checkpointing=True) < plain.peak_bytes
    adapter = predict(config(), replace(SETUP, lora=8))
    assert adapter.parts["optimiser"] < plain.parts["optimiser"] / 10
    assert adapter.parts["gradients"] < plain.parts["optimiser"] / 10


def test_an_mlp_in_slices_takes_less_of_a_long_row():
    wide = config(intermediate_size=2048, vocab_size=64)
    long = replace(SETUP, batch=1, length=16384, variant="kernels", checkpointing=True)
    whole, sliced = (predict(wide, replace(long, variant=v)) for v in ("kernels", "kernels, tiled MLP"))
    # Three tensors of the inner size, of half of the tokens; and a sum in fp32 with a gradient for each weight.
    saved = 3 * 2 * 8192 * 2048 - 6 * 3 * 256 * 2048
    assert whole.peak_bytes - sliced.peak_bytes > saved / 2


def test_shares_of_several_devices(plain):
    sharded = predict(config(), replace(SETUP, sharding="fsdp2", devices=4))
    assert sharded.parts["weights"] == pytest.approx(plain.parts["weights"] / 4, rel=0.01)
    assert sharded.parts["optimiser"] == pytest.approx(plain.parts["optimiser"] / 4, rel=0.01)
    assert sharded.parts["activations"] == plain.parts["activations"]
    # Embedding, head and last norm are gathered for the whole step.
    assert sharded.parts["other"] - plain.parts["other"] >= 2 * 2 * 4096 * 256
    # And so are their gradients, until backward ends: of one short row they are the most.
    short = replace(SETUP, batch=1, length=8, sharding="fsdp2", devices=4)
    assert predict(config(vocab_size=65536), short).parts["gradients"] >= 2 * 65536 * 256
    everywhere = predict(config(), replace(SETUP, sharding="ddp", devices=4))
    assert everywhere.peak_bytes - plain.peak_bytes == 2 * numbers()
    # DeepSpeed's optimiser has three fp32 numbers for what AdamW has two bf16 ones.
    zero = predict(config(), replace(SETUP, sharding="zero3", devices=4))
    assert zero.parts["optimiser"] == pytest.approx(3 * sharded.parts["optimiser"], rel=0.01)


def test_ddp_holds_the_gradients_of_its_first_step(plain):
    def more(**changes) -> int:
        setup = replace(SETUP, **changes)
        alone = predict(config(), setup).peak_bytes
        everywhere = replace(setup, sharding="ddp", devices=2)
        return predict(config(), everywhere).peak_bytes - alone

    one = 2 * numbers()
    # The Trainer has DDP look for unused parameters, unless layers are checkpointed; then its first bucket is of all.
    assert more() == one
    assert more(checkpointing=True) == 2 * one
    assert predict(config(), replace(SETUP, sharding="ddp", devices=2, find_unused=False)).peak_bytes == (
        plain.peak_bytes + 2 * one
    )
    # TRL's trainers send something before backward. The most of it is in backward then; without, it was in forward.
    assert one <= more(trainer="sft", checkpointing=True) < 1.2 * one
    # What has an adapter is no model of transformers to the Trainer.
    adapter = predict(config(), replace(SETUP, lora=8, checkpointing=True)).parts["optimiser"]
    assert more(lora=8, checkpointing=True) == pytest.approx(adapter / 2, rel=0.05)


@pytest.mark.parametrize("trainer", ["sft", "grpo", "dpo"])
def test_trls_trainers(trainer):
    prompt = 64 if trainer != "sft" else 0
    setup = replace(SETUP, trainer=trainer, prompt=prompt, autocast=True, checkpointing=True)
    found = [predict(config(), replace(setup, variant=variant)) for variant in VARIANTS]
    # DPO holds a second model.
    models = 2 if trainer == "dpo" else 1
    assert [p.parts["weights"] // (2 * numbers()) for p in found] == [models] * len(found)


@pytest.mark.parametrize("variant", ["plain", "kernels"])
def test_logits_in_tiles_and_chunks_are_the_heads(variant):
    """Nothing else of a frozen head is: TRL's tiles have fewer columns than there are words, and a chunk of ours lies
    in memory without a shape."""
    setup = replace(SETUP, trainer="sft", autocast=True, lora=8, variant=variant)
    found = predict(config(num_hidden_layers=1, vocab_size=1 << 16), setup)
    assert found.parts["head"] > 2 * 1000 * (1 << 15)
    assert found.parts["activations"] < found.parts["head"]


def test_experts_are_the_kernels_on_a_card(monkeypatch):
    family, arguments, _ = MODELS["qwen3-moe"]
    experts = getattr(transformers, f"{family}Config")(**{**arguments, "num_hidden_layers": 6, "vocab_size": 512})
    setup = replace(SETUP, length=1024, variant="kernels")
    all_of_them = predict(experts, setup)
    monkeypatch.setitem(VARIANTS, "kernels", {"ops": [op for op in PATCHES if op != "moe_experts"]})
    own = predict(experts, setup)
    # Of each row of the experts the op keeps 2 I numbers, where their own code keeps H and more beside them.
    rows, hidden, layers = 4 * 1024 * 8, 1024, 6
    assert own.parts["activations"] - all_of_them.parts["activations"] > rows * hidden * 2 * layers


def test_adapters_on_experts(recwarn):
    """`all-linear` has those, too: PEFT adapts their parameters, the product of two with twice the rank."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    experts = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    found = [predict(experts, replace(SETUP, lora=8, variant=variant)) for variant in ("plain", "kernels")]
    attention = 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    numbers = attention + 4 * (16 * (64 + 64) + 8 * (32 + 64))
    # Two moments in fp32; each tensor is a multiple of 512 bytes, and has a count of steps.
    assert [0 <= p.parts["optimiser"] - 2 * 4 * numbers <= 12 * 3 * 512 for p in found] == [True, True]
    assert [str(w.message) for w in recwarn if issubclass(w.category, RuntimeWarning)] == []


def test_experts_in_fp32():
    """Of fake tensors PyTorch knows grouped products in bf16 alone."""
    family, arguments, _ = MODELS["qwen3-moe"]
    experts = getattr(transformers, f"{family}Config")(
        **{**arguments, "num_hidden_layers": 1, "num_experts": 8, "vocab_size": 512}
    )
    full = replace(SETUP, dtype=torch.float32)
    plain, kernels = (predict(experts, replace(full, variant=variant)) for variant in ("plain", "kernels"))
    half = predict(experts, SETUP)
    assert plain.parts["weights"] == kernels.parts["weights"] == pytest.approx(2 * half.parts["weights"], rel=1e-3)
    assert plain.parts["activations"] > kernels.parts["activations"] > half.parts["activations"]


def test_a_model_that_asks_for_values_is_refused(monkeypatch):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linear(*args) * linear(*args).sum().item())
    with pytest.raises(ValueError, match=r"its code asks for values \(aten._local_scalar_dense"):
        predict(config(), SETUP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"pad_token_id": 5000}, "AssertionError: Padding_idx must be within num_embeddings"),
    ],
)
def test_a_config_of_which_no_model_can_be_made(changes, message):
    with pytest.raises(ValueError, match=f"^no model can be made of it: {message}"):
        predict(config(**changes), SETUP)


def test_quantised_weights_are_refused():
    quantised = config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ValueError, match=r"its weights are quantised \(quantization_config\)"):
        predict(quantised, SETUP)


@pytest.mark.parametrize("family", ["Bert", "Mamba"])
def test_models_with_unused_weights_and_without_attention(family):
    """BERT's pooler gets no gradient; Mamba has nothing that PyTorch's attention could do."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 128, "is_decoder": True} if family == "Bert" else {}
    found = predict(getattr(transformers, f"{family}Config")(**sizes), Setup("trainer", 1, 8))
    assert found.parts["weights"] > 0


def test_a_bias_of_attention_that_is_trained():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128, "num_attention_heads": 4}
    found = predict(transformers.DogeConfig(**sizes, intermediate_size=128, head_dim=16), Setup("trainer", 2, 64))
    assert found.parts["weights"] > 0


def test_the_host_is_itself_again():
    predict(config(num_hidden_layers=1), replace(SETUP, variant="kernels"))
    assert device.kind_of(torch.device("cpu")) == "cpu"
    assert device.spec(torch.device("cpu")).kind == "cpu"
    q = torch.randn(1, 2, 4, 8)
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "ppo"}, "trainer must be one of trainer, sft, grpo, dpo, distil; got 'ppo'"),
        ({"batch": 0}, "batch must be an integer of at least 1; got 0"),
        ({"prompt": 8}, "prompt=8 has no effect with trainer='trainer'"),
        ({"sharding": "fsdp2"}, "got 'fsdp2' with devices=1"),
        ({"variant": "liger"}, "variant must be one of plain, kernels"),
        ({"find_unused": True}, "find_unused=True has no effect with sharding='none'"),
        ({"capture": True}, "capture=True and rollouts=0 need a variant with kernels; got 'plain'"),
        (
            {"capture": True, "variant": "kernels", "sharding": "ddp", "devices": 2},
            "capture=True is modelled on one device alone; got sharding='ddp'",
        ),
        ({"rollouts": -1}, "rollouts must be an integer of at least 0; got -1"),
        ({"rollouts": 1, "variant": "kernels"}, "rollouts=1 needs trainer='grpo' and a prompt of at least 1 token"),
        (
            {"rollouts": 1, "variant": "kernels", "trainer": "grpo", "prompt": 8, "sharding": "zero3", "devices": 2},
            "rollouts=1 has no effect with sharding='zero3', where generate's own loop runs",
        ),
        ({"trainer": "distil"}, "teacher must be a config with trainer='distil', and None with others; got None"),
    ],
)
def test_a_setup_says_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SETUP, **changes)


# ---------------------------------------------------------------------------------------------------------------------
# Held to what was measured
# ---------------------------------------------------------------------------------------------------------------------


# Committed runs whose rows are all of one length.
MEASURED = [
    ("sft-trainer", "llama-1b 8x2048", step_cases.StepWorkload("sft-trainer", "llama-1b", 8, 2048)),
    ("sft-trl", "llama-1b 8x2048", step_cases.StepWorkload("sft-trl", "llama-1b", 8, 2048)),
    ("sft-trainer", "gemma3-1b 4x2048", step_cases.StepWorkload("sft-trainer", "gemma3-1b", 4, 2048)),
]


@pytest.mark.parametrize(("op", "shape", "workload"), MEASURED)
@pytest.mark.parametrize("variant", fit_check.STEPS_OF)
def test_committed_steps(op, shape, workload, variant):
    _, rows = read(RESULTS / "2026-11-22-nvidia-h200-fifth-round-steps.json")
    (row,) = (r for r in rows if (r["op"], r["shape"], r["provider"]) == (op, shape, variant))
    predicted = fit_check.predict_one(fit_check.Configuration(workload), variant).peak_bytes
    assert abs(predicted / row["peak_bytes"] - 1) <= ALLOWED_ALONE


@pytest.mark.parametrize("variant", fit_check.STEPS_OF)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_committed_steps_on_two_cards(sharding, variant):
    _, rows = read(RESULTS / "2026-11-22-nvidia-h200-sixth-round-two-gpus.json")
    called = (f"sft-{sharding}", "llama-1b 2x4x2048", variant)
    (row,) = (r for r in rows if (r["op"], r["shape"], r["provider"]) == called)
    workload = step_cases.StepWorkload("sft-trainer", "llama-1b", 4, 2048)
    setup = fit_check.setup_of(fit_check.Configuration(workload), variant)
    # A loop of its own, with `DistributedDataParallel` as it is.
    wrapped = replace(setup, sharding=sharding, devices=2, find_unused=False if sharding == "ddp" else None)
    predicted = predict(fit_check.config_of("llama-1b"), replace(wrapped, memory=150109880320)).peak_bytes
    assert abs(predicted / row["peak_bytes"] - 1) <= 0.005


def test_committed_comparison():
    files = sorted(RESULTS.glob("*-fit.json"))
    assert files, "python -m benchmarks.fit_check writes it"
    _, rows = read(files[-1])
    assert [row for row in rows if row["status"] != "ok"] == []
    assert len({(row["op"], row["shape"]) for row in rows}) >= 8
    assert fit_check.worst(rows) <= ALLOWED


def test_the_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    output, asked = tmp_path / "fit.json", []

    def child(configuration, variant):
        asked.append((configuration.shape, variant))
        if len(asked) == 2:
            return {"status": "error", "reason": "lost", "log": ""}
        return {"status": "ok", "peak_bytes": 100, "predicted_bytes": 97, "parts": {}, "error": -0.03}

    monkeypatch.setattr(fit_check, "run_child", child)
    assert fit_check.main(["--output", str(output)]) == 1
    assert "largest error 3.00%; 1 of 4 failed" in capsys.readouterr().out
    assert fit_check.main(["--output", str(output)]) == 0
    assert len(asked) == 5  # what failed is tried again, and nothing else
    assert fit_check.worst(read(output)[1]) == 0.03


def test_predictions_are_made_again_beside_the_same_peaks(tmp_path, capsys):
    (name,) = RESULTS.glob("*-h200-fit.json")
    meta, rows = read(name)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    gemma = next(row for row in rows if (row["shape"], row["provider"]) == ("gemma3-1b 4x2048", "flag"))
    old.write_text(json.dumps({"meta": meta, "rows": [gemma]}))
    assert fit_check.main(["--again", str(old), "--output", str(new), "--commit", "1234567"]) == 0
    assert "largest error 0.45%" in capsys.readouterr().out
    made, (row,) = read(new)
    assert (row["peak_bytes"], row["predicted_when_measured_bytes"]) == (gemma["peak_bytes"], gemma["predicted_bytes"])
    assert sum(row["parts"].values()) == row["predicted_bytes"]
    assert (made["commit"], made["measured_in"], made["predicted"]["commit"]) == ("beee277", "old.json", "1234567")


def test_a_real_trainer_under_the_same_ledger():
    configuration = fit_check.configurations("cpu")[0]
    measured = fit_check.measure_one(configuration, "plain")
    predicted = fit_check.predict_one(configuration, "plain").peak_bytes
    assert abs(predicted / measured - 1) <= ALLOWED


# ---------------------------------------------------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [99, 100, 101, 109, 110, 111, 5000, 5003, 60000])
@pytest.mark.parametrize("bend", [0, 7, 300])
def test_the_largest_batch(memory, bend):
    asked = []

    def peak(batch: int) -> int:
        asked.append(batch)
        return max(100, 90 + 10 * batch + max(0, batch - bend) * 3)

    most = 4096
    found = largest_batch(peak, memory, most)
    assert found == max((b for b in range(1, most + 1) if peak(b) <= memory), default=0)
    del asked[-most:]
    assert len(asked) == len(set(asked)) <= 12
    assert max(asked) <= most


def row(variant, checkpointing, gib, largest, sharding="none"):
    return {
        "variant": variant, "checkpointing": checkpointing, "sharding": sharding, "parts": {}, "fits": largest >= 2,
        "peak_bytes": int(gib * GIB), "largest_batch": largest, "more_may_fit": largest == 512,
    }  # fmt: skip


def test_advice_is_the_least_effort_that_fits():
    rows = [row("plain", False, 30, 1), row("kernels", False, 20, 3), row("kernels", True, 10, 9, "fsdp2")]
    assert advice(rows, 2) == (
        "Fits: kernels without checkpointing, at micro-batches of up to 3. "
        "The most is 9, kernels with checkpointing, FSDP2."
    )
    assert advice(rows[:1], 2) == (
        "Does not fit: a micro-batch of 2 takes at least 30.0 GiB (plain without checkpointing); "
        "the largest that fits is one of 1."
    )
    nothing = [row("plain", False, 30, 0), row("kernels", True, 20, 0)]
    says = "takes at least 20.0 GiB (kernels with checkpointing)"
    assert advice(nothing, 1) == f"Does not fit: a micro-batch of 1 {says}."
    assert advice(nothing, 2) == f"Does not fit: a micro-batch of 2 {says}, and one of 1 does not fit either."
    assert advice([*rows, row("kernels", True, 9, 512)], 2).endswith(
        "The most is at least 512, kernels with checkpointing."
    )
    assert advice([row("plain", False, 30, 512)], 2) == (
        "Fits: plain without checkpointing, at micro-batches of 512 and more."
    )


def test_an_end_to_what_is_tried():
    """Whatever fits: a step on tensors without memory takes the longer the more tokens it has."""
    assert [most_tried(tokens) for tokens in (16, 1024, 4096, 1 << 17)] == [1024, 512, 128, 16]


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def test_the_command_knows_what_there_is():
    # It is parsed before torch is imported.
    assert _fit.TRAINERS == TRAINERS
    assert ("none", *_fit.SHARDINGS) == SHARDINGS


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    return str(tmp_path)


def test_json_and_figure(model, tmp_path, capsys):
    figure = tmp_path / "fit.svg"
    # Two GiB are kept free; what is left is little.
    arguments = ["--memory", "2.15", "--trainer", "trainer", "--seq", "256", "--figure", str(figure), "--json"]
    assert main(["fit", "--model", model, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["variant"], r["checkpointing"]) for r in found["rows"]] == [
        (variant, checkpointing) for checkpointing in (False, True) for variant in VARIANTS
    ]
    for each in found["rows"]:
        assert list(each["parts"]) == list(PARTS)
        assert sum(each["parts"].values()) == each["peak_bytes"]
        assert each["fits"] == (each["peak_bytes"] <= found["usable_bytes"]) == (each["largest_batch"] >= 1)
        assert not each["more_may_fit"]
    assert found["fits"]
    assert found["verdict"].startswith("Fits: plain without checkpointing")
    assert "<svg" in figure.read_text()


def test_what_is_counted_is_shown(model, capsys, monkeypatch):
    asked = []

    def small(config, setup):
        asked.append(setup)
        kernels = VARIANTS[setup.variant] is not None
        counted = {"rollouts": GIB * (kernels and setup.rollouts), "graphs": GIB * setup.capture}
        parts = dict.fromkeys(PARTS, 0) | counted
        return Prediction(parts, parts if setup.rollouts else {})

    monkeypatch.setattr(fit, "predict", small)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["fit", "--model", model, "--memory", "80", "--trainer", "grpo", "--prompt", "8"]
    assert main([*arguments, "--rollouts", "3", "--capture", "on", "--json"]) == 0
    # What has no kernels captures nothing, and generates by generate's own loop.
    assert {(s.variant != "plain", s.rollouts, s.capture) for s in asked} == {(False, 0, False), (True, 3, True)}
    found = json.loads(capsys.readouterr().out)
    assert [row["generation"].get("rollouts") for row in found["rows"][:2]] == [None, 3 * GIB]
    assert (found["rollouts"], found["capture"], found["teacher"]) == (3, "on", None)
    for more, shown in (([], ()), (["--rollouts", "3"], ("rollouts",)), (["--capture", "on"], ("graphs",))):
        assert main([*arguments, *more]) == 0
        head = capsys.readouterr().out.split("checkpointing")[1].split("peak")[0]
        assert tuple(part for part in ("rollouts", "graphs") if part in head) == shown
    asked.clear()
    assert main(["fit", "--model", model, "--memory", "80", "--trainer", "distil", "--teacher", model]) == 0
    assert {s.teacher.hidden_size for s in asked} == {256}


@pytest.mark.parametrize(("arguments", "most"), [([], 512), (["--batch", "600"], 600), (["--trainer", "dpo"], 256)])
def test_a_small_model_on_a_large_card(model, capsys, monkeypatch, arguments, most):
    asked = []

    def small(config, setup):
        asked.append(setup.batch)
        return Prediction(dict.fromkeys(PARTS, setup.batch))

    monkeypatch.setattr(fit, "predict", small)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["fit", "--model", model, "--memory", "80", *arguments]) == 0
    assert max(asked) == most
    assert len(asked) <= 8 * 6
    out = capsys.readouterr().out
    assert out.count(f" {most}+") == 6
    assert f"Fits: plain without checkpointing, at micro-batches of {most} and more." in " ".join(out.split())
    assert main(["fit", "--model", model, "--memory", "80", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["largest_batch"], row["more_may_fit"]) for row in rows} == {(most, True)}


def test_what_does_not_fit_is_exit_code_1(model, capsys):
    assert main(["fit", "--model", model, "--memory", "2.01", "--devices", "2", "--sharding", "ddp"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit: a micro-batch of 1 takes at least 0.1 GiB" in out
    assert "DDP" in out


def test_memory_has_no_unit(model, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model", model, "--memory", "80GB"])
    wanted = "argument --memory: must be a number of GiB without a unit, like 80; got '80GB'"
    assert wanted in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "0"], "--memory must be a positive number of GiB; got 0"),
        (
            ["--memory", "1"],
            "--memory must be more than the 2 GiB that are kept free by default, which --reserve changes",
        ),
        (["--memory", "2", "--reserve", "2"], "--reserve must be at least 0 and less than --memory 2; got 2"),
        (["--devices", "0"], "--devices must be at least 1; got 0"),
        (["--sharding", "fsdp2"], "--sharding fsdp2 does nothing on one device"),
        (["--prompt", "8"], "--prompt 8 does nothing with --trainer sft"),
        (["--trainer", "grpo", "--seq", "8", "--prompt", "8"], "--prompt must be less than --seq 8; got 8"),
        (["--figure", "fit.txt"], "--figure must end with .png, .svg, .pdf; got 'fit.txt'"),
        (["--figure", "nowhere/fit.png"], "--figure must be in a folder that is there; got 'nowhere/fit.png'"),
        (["--model", "nowhere/model"], "nowhere/model"),
        (["--trainer", "distil"], "--trainer distil needs --teacher"),
        (["--teacher", "x"], "--teacher x does nothing with --trainer sft; leave it out"),
        (["--trainer", "distil", "--teacher", "nowhere/model"], "--teacher 'nowhere/model'"),
        (["--rollouts", "-1"], "--rollouts must be at least 0; got -1"),
        (["--rollouts", "2"], "--rollouts 2 does nothing with --trainer sft"),
        (["--rollouts", "2", "--trainer", "grpo"], "--rollouts 2 needs --prompt"),
        (
            ["--rollouts", "2", "--trainer", "grpo", "--prompt", "8", "--devices", "2"],
            "--rollouts 2 does nothing with --sharding fsdp2, where generate's own loop runs; name --sharding ddp",
        ),
        (["--capture", "on", "--devices", "2"], "--capture on is modelled on one device; got --devices 2"),
    ],
)
def test_wrong_usage_is_exit_code_2(model, capsys, arguments, message):
    assert main(["fit", "--model", model, "--memory", "80", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # transformers divides by the one, the model by the other.
        ({"num_attention_heads": 0}, "which must be at least 1; got num_attention_heads = 0"),
        ({"num_key_value_heads": 0}, "which must be at least 1; got num_key_value_heads = 0"),
        ({"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 0}, "; got num_key_value_heads = 0"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"hidden_size": 0}, "hidden_size of its config must be at least 1; got 0"),
        ({"vocab_size": 0}, "vocab_size of its config must be at least 1; got 0"),
        ({"vocab_size": -1}, "vocab_size of its config must not be negative; got -1"),
    ],
)
def test_a_size_of_a_config_that_no_model_has_is_named(tmp_path, capsys, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1, **changes}))
    assert main(["fit", "--model", str(tmp_path), "--memory", "80"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("said", "shown"), [("", "ValueError"), ("\nfirst\nsecond", "first")])
def test_a_refusal_is_one_line_whatever_it_says(model, capsys, monkeypatch, said, shown):
    def refuse(config, setup):
        raise ValueError(said)

    monkeypatch.setattr(fit, "predict", refuse)
    assert main(["fit", "--model", model, "--memory", "80"]) == 2
    assert " ".join(capsys.readouterr().err.split()).endswith(f": {shown}")


# ---------------------------------------------------------------------------------------------------------------------
# Captured bodies, rollouts, a teacher: held to the tensors that the code makes
# ---------------------------------------------------------------------------------------------------------------------


def kept_in_a_pool(monkeypatch, checkpointing: bool) -> int:
    """Trains a real model with a captured body on the CPU; returns the bytes of what was made while it was captured and
    is still there."""
    made, given = {}, []
    knows, watch = Watch.knows, Watch.__init__

    def watching(self, known, fixed):
        given.extend(tensor.untyped_storage() for tensor in (*known, *fixed))
        watch(self, known, fixed)

    def noted(self, tensors):
        tensors = list(tensors)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        knows(self, tensors)

    class Passing(graph.TapeRecorder):
        """What is recorded lives no longer than a device's graph keeps it."""

        def end(self):
            self._watch.target = None
            return Tape()

        def begin(self, likes=()):
            buffers = super().begin(likes)
            self._watch.target = Nothing()
            return buffers

        def alias(self, tensor):
            return torch.zeros_like(tensor)

    # As a function of a package whose code does not change: what it notes is nothing that a body has read.
    unseen = types.FunctionType(noted.__code__, {**globals(), "__name__": "torch"}, closure=noted.__closure__)
    monkeypatch.setattr(Watch, "__init__", watching)
    monkeypatch.setattr(Watch, "knows", unseen)
    monkeypatch.setattr(body_capture, "recorder_for", lambda device: Passing())
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(4096, (4, 256))
    with apply_npu_kernels(model, ops=["varlen_attention", "linear_cross_entropy"], capture="on") as handle:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
        gc.collect()
        assert handle.report().capture.replayed > 0
        # Views of parameters and inputs are no memory of the pool, whose blocks are multiples of 512 bytes.
        others = {storage._cdata for storage in given}
        kept = [size for at, (reference, size) in made.items() if at not in others and not reference.expired()]
        return sum(-(-size // 512) * 512 for size in kept)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_pool_keeps_what_a_captured_body_keeps(monkeypatch, checkpointing):
    ledgers = []
    original = Ledger.__init__
    monkeypatch.setattr(Ledger, "__init__", lambda self, *args: (original(self, *args), ledgers.append(self))[0])
    monkeypatch.setitem(VARIANTS, "kernels", {"ops": ["varlen_attention", "linear_cross_entropy"]})
    attention = importlib.import_module("npu_trainer_kernels.ops.attention.varlen_attention")
    # Cards attend by other operators than a CPU, which keep other tensors.
    by_mask = attention._by_mask
    monkeypatch.setattr(attention, "by_flash", lambda *_: None)
    monkeypatch.setattr(attention, "_by_mask", lambda *given: by_mask(*given[:-1], True))
    left = []
    with monkeypatch.context() as patch:
        step = _step._step
        patch.setattr(_step, "_step", lambda *args: (step(*args), gc.collect(), left.append(args[-1].pooled))[0])
        found = predict(config(), replace(SETUP, variant="kernels", checkpointing=checkpointing, capture=True))
    real = kept_in_a_pool(monkeypatch, checkpointing)
    assert left == [real]
    # And a pool gives nothing back.
    assert found.parts["graphs"] > real


GRPO = Setup("grpo", 4, 320, 64, autocast=True, variant="kernels", rollouts=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_rollout_holds_what_the_engine_makes(monkeypatch, dtype):
    made = []

    class Kept(_rollouts.RolloutCache):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)

    class Copies(_rollouts.Weights):
        def __init__(self):
            super().__init__()
            made.append(self)

    class State(_rollouts.Rows):
        @classmethod
        def make(cls, *args):
            made.append(super().make(*args))
            return made[-1]

    for name, kind in (("RolloutCache", Kept), ("Weights", Copies), ("Rows", State)):
        monkeypatch.setattr(_rollouts, name, kind)
    predicted = predict(config(), replace(GRPO, dtype=dtype))
    cache, copies, rows = made

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=dtype).eval()
    ask = transformers.GenerationConfig(max_new_tokens=256, do_sample=True, pad_token_id=0, eos_token_id=1)
    with apply_npu_kernels(model) as handle, torch.autocast("cpu", torch.bfloat16):
        engine = serve_rollouts(handle, keep=True).engine
        completions(model, [[2 + i] * 64 for i in range(8)], ask)
        real = [engine.step.cache.tensors(), engine.step.rows.tensors()]
        assert [[(t.shape, t.dtype) for t in each] for each in real] == [
            [(t.shape, t.dtype) for t in each] for each in (cache.tensors(), rows.tensors())
        ]
        of_engine = engine._copies.nbytes
    assert copies.nbytes == of_engine > 0
    held = sum(t.nbytes for each in real for t in each) + of_engine
    logits = 4 * 8 * 4096
    # Beside it two tensors of logits, and at most four more where a token is chosen.
    assert held + 2 * logits <= predicted.generation["rollouts"] <= held + 6 * logits + 64 * 512


def test_the_peak_is_that_of_the_larger_phase():
    update = predict(config(), replace(GRPO, rollouts=0))
    assert update.generation == {}
    few, many = (predict(config(), replace(GRPO, rollouts=count)) for count in (1, 64))
    # What a rollout holds is given back before the update.
    assert few.parts == update.parts
    assert sum(few.generation.values()) < few.peak_bytes
    assert many.parts == many.generation
    assert many.peak_bytes > update.peak_bytes
    # Caches get half of the free memory at most; other rows wait.
    little = predict(config(), replace(GRPO, rollouts=64, memory=update.peak_bytes))
    assert little.generation["rollouts"] < few.generation["rollouts"] < many.generation["rollouts"]


def a_rule(tokens: int) -> list[torch.Tensor]:
    """The arguments of a gated delta rule in bf16, with gates in fp32, as Qwen3.5 has them."""
    shapes = [(1, tokens, 2, 16), (1, tokens, 2, 16), (1, tokens, 4, 16), (1, tokens, 4), (1, tokens, 4)]
    made = [torch.randn(shape).to(torch.bfloat16 if i < 3 else torch.float32) for i, shape in enumerate(shapes)]
    gate, beta = -made[3].abs(), made[4].sigmoid()
    return [each.requires_grad_() for each in (*made[:3], gate, beta)]


def of_transformers(q, k, *others):
    """With as many heads of queries and keys as of values, which transformers asks for before 5.23."""
    q, k = (each.repeat_interleave(2, 2) for each in (q, k))
    return inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)(q, k, *others, use_qk_l2norm_in_kernel=True)[0]


def of_the_op(*given):
    return gated_delta_rule(*given, normalize=True, backend="torch")


@pytest.mark.parametrize("rule", [of_transformers, of_the_op])
def test_a_delta_rule_keeps_what_it_saves(rule):
    """To the byte, beside its inputs: transformers' fallback every matrix of every chunk, the op some indices."""
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger(vocabulary=7) as ledger:
        given = a_rule(160)
        gc.collect()
        before = ledger.total
        out = rule(*given)
        gc.collect()
        kept = ledger.total - before
    given, saved = a_rule(160), {}
    inputs = {each.untyped_storage()._cdata for each in given}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = rule(*given)
    grid = vars(out.grad_fn.slices.grid).values() if rule is of_the_op else ()
    indices = [each for each in grid if isinstance(each, torch.Tensor)]
    saved |= {each.untyped_storage()._cdata: each.untyped_storage() for each in (out, *indices)}
    sizes = [-(-each.nbytes() // 512) * 512 for at, each in saved.items() if at not in inputs]
    assert kept == sum(sizes)
    if rule is of_the_op:
        assert len(sizes) == 1 + len(indices)


@pytest.mark.parametrize("family", ["qwen3.5", "granite4"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bodies_with_a_state(monkeypatch, family, checkpointing):
    """As on an accelerator, the kernels carry the states of rows without padding by the op, which keeps its inputs."""
    kind, _, sizes = HYBRIDS[family]
    made = getattr(transformers, kind)(**{**SMALL, **sizes, "vocab_size": 8192})
    setup = Setup("trainer", 4, 256, checkpointing=checkpointing)
    before, after = (predict(made, replace(setup, variant=variant)) for variant in ("plain", "kernels"))
    assert before.parts["weights"] == after.parts["weights"] > 0
    assert after.peak_bytes < before.peak_bytes
    if not checkpointing:  # else the states of one layer are kept
        monkeypatch.setattr(padding, "_taken_for_full", lambda form, given: False)
        by_transformers = predict(made, replace(setup, variant="kernels"))
        assert after.parts["activations"] < by_transformers.parts["activations"]
        assert after.peak_bytes < by_transformers.peak_bytes


def test_a_teacher_is_counted():
    teacher = config(hidden_size=512, num_hidden_layers=2)
    setup = Setup("distil", 4, 256, 64, autocast=True, variant="kernels", teacher=teacher)
    alone, both = predict(config(), Setup("trainer", 4, 256, autocast=True)), predict(config(), setup)
    with torch.device("meta"):
        weights = transformers.AutoModelForCausalLM.from_config(teacher).parameters()
    of_teacher = 2 * sum(p.numel() for p in weights)
    assert both.parts["weights"] - alone.parts["weights"] == pytest.approx(of_teacher, abs=8192)
    assert both.parts["optimiser"] == alone.parts["optimiser"]
    # Of its activations the last hidden states alone are kept: more layers of it take no more.
    deeper = replace(setup, teacher=config(hidden_size=512, num_hidden_layers=4))
    assert predict(config(), deeper).parts["activations"] == both.parts["activations"]


def test_the_heads_of_student_and_teacher_hold_one_chunk_of_each():
    """The same call on real tensors, under the same ledger."""

    def peak(like) -> int:
        x, teacher_x = like(768, 256), like(768, 512)
        weight, teacher_weight = like(4096, 256).requires_grad_(), like(4096, 512)
        with Ledger(4096) as ledger:
            loss = linear_divergence(x, weight, teacher_x, teacher_weight, beta=1.0, backend="torch", chunk_rows=256)
            loss.backward()
        return ledger.peak_bytes

    def real(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16)

    with FakeTensorMode():
        predicted = peak(lambda *shape: torch.empty(*shape, dtype=torch.bfloat16))
    assert predicted == peak(real) > 2 * 2 * 256 * 4096
