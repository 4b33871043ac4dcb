"""Captured bodies: equal to the bit to the body's own code in the same bucket, with other lengths at each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.gpt_oss import modeling_gpt_oss

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.options import MODEL_OPS
from tests.models import small_model
from tests.patching.captured import FULL, rows
from tests.patching.padded import Batch, loss_of, of_transformers, padded
from tests.patching.whole import STEPS, BodyTwins, llama_bodies
from tests.test_callback import make_trainer

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {}, "llama-tied": {}, "qwen2": {}, "qwen3": {}, "gemma2": {"sliding_window": 6}, "gemma3": WINDOWS,
    "phi3": {}, "cohere": {}, "olmo2": {}, "granite": {},
}  # fmt: skip


def assert_replayed(twins: BodyTwins, steps: int, graphs: int = 2) -> None:
    """All steps but the first one are replays of so many graphs."""
    assert twins.replayed == steps - 1, str(twins.bodies)
    assert twins.bodies.captured == graphs, twins.rooms
    assert not twins.reasons


@pytest.mark.full("llama-tied", "qwen2", "phi3", "cohere", "olmo2", "granite")
@pytest.mark.parametrize("family", DENSE)
def test_families_have_the_same_bits_with_other_lengths_at_each_step(family: str) -> None:
    twins = BodyTwins(small_model(family, **DENSE[family]))
    twins.steps((*STEPS, *FULL))
    assert_replayed(twins, len(STEPS) + len(FULL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    twins = BodyTwins(small_model("qwen3").to(dtype))
    twins.steps(STEPS)
    assert_replayed(twins, len(STEPS))


def in_autocast(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def test_weights_of_fp32_under_autocast() -> None:
    twins = llama_bodies()
    twins.steps(STEPS[:3], in_autocast)
    twins.steps(STEPS[:3])
    twins.steps(STEPS[3:], in_autocast)
    assert twins.replayed == len(STEPS) + 1
    assert twins.bodies.captured == 4


def test_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS with the first expert for all tokens, since its experts choose tokens on the host."""

    def forward(experts: Any, hidden: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = experts.gate_up_proj[0], experts.down_proj[0]
        return (hidden @ up[:, : down.shape[0]]).relu() @ down * weights.sum(-1, keepdim=True)

    monkeypatch.setattr(modeling_gpt_oss.GptOssExperts, "forward", forward)
    twins = BodyTwins(small_model("gpt-oss", sliding_window=6), ops=["varlen_attention", "rms_norm"])
    twins.steps(STEPS)
    assert_replayed(twins, len(STEPS))


SHARED = (
    padded(),
    padded(((3, 21), (3, 18), (3, 14), (5, 20))),
    padded(((2, 21), (2, 13), (2, 17))),
    padded(((0, 16), (0, 20), (0, 21), (0, 15))),
)


def test_beginnings_that_rows_share() -> None:
    twins = llama_bodies()
    twins.steps(SHARED)
    assert twins.replayed == 3, str(twins.bodies)
    assert all(room.keys for room in twins.rooms)
    positions, live, computed = twins.kernels.positions
    assert computed < live < positions
    captured = twins.bodies.captured
    twins.steps((*STEPS[:2], *SHARED))
    assert twins.bodies.captured == captured + 2  # of rows that share nothing


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    twins = llama_bodies(of_transformers(reentrant))
    twins.steps((*STEPS, *SHARED))
    assert twins.replayed == len(STEPS) + len(SHARED) - 1, str(twins.bodies)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_lora_and_a_reference_whose_adapter_is_off(checkpointed: bool) -> None:
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False)
    twins = BodyTwins(
        get_peft_model(small_model("llama"), config).train(),
        of_transformers(False) if checkpointed else None,
    )

    def step(model: Any, batch: Batch) -> torch.Tensor:
        if checkpointed:
            model.enable_input_require_grads()  # as TRL does at each step
        with model.disable_adapter(), torch.no_grad():
            reference = model(**batch).logits
        with torch.no_grad():
            old = model(**batch).logits
        logits = model(**batch).logits
        live = batch["attention_mask"].bool()
        return (logits - reference)[live].square().mean() + (logits - 2 * old)[live].abs().mean()

    twins.steps(STEPS, step)
    assert twins.replayed == 3 * len(STEPS) - 2, str(twins.bodies)
    assert twins.bodies.captured == 4


def test_parameters_that_are_frozen_and_one_that_is_trained_later() -> None:
    twins = llama_bodies()
    for model in twins.both:
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
    twins.steps(STEPS[:3])
    for model in twins.both:
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    twins.steps(STEPS[3:])
    assert_replayed(twins, len(STEPS), 4)


def test_a_mixture_and_its_routers_loss() -> None:
    model = small_model("qwen3-moe", experts_implementation="batched_mm", router_aux_loss_coef=1.0)
    twins = BodyTwins(model, ops=[op for op in MODEL_OPS if op != "moe_experts"])
    twins.steps(STEPS)
    assert_replayed(twins, len(STEPS))


def test_rows_that_a_collator_has_packed() -> None:
    def packed(*lengths: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 331, (1, sum(lengths)), generator=generator)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}

    twins = llama_bodies()
    twins.steps([packed(20, 7, 9, seed=0), packed(40, 3, seed=1), packed(*[5] * 9, seed=2)])
    assert_replayed(twins, 3)


def test_embeddings_as_inputs() -> None:
    twins = llama_bodies()

    def step(model: Any, batch: Batch) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"]) * 2
        given = {name: value for name, value in batch.items() if name != "input_ids"}
        return loss_of(model, {**given, "inputs_embeds": embedded})

    twins.steps(STEPS, step)
    assert_replayed(twins, len(STEPS))


def test_a_batch_runs_in_any_bucket_that_has_room() -> None:
    twins = llama_bodies()
    few, many, long = rows(30, 25, seed=1), rows(*[3] * 20, seed=2), rows(30, 30, 30, seed=3)
    twins.steps([few, few, STEPS[0]])
    assert twins.bodies.captured == 2
    twins.steps([many])  # more segments than there was room for
    assert twins.bodies.captured == 4
    twins.steps([long, few, many, STEPS[1]])  # more tokens, and all others in the wider one of two
    assert twins.bodies.captured == 6
    assert len({room.segments for room in twins.rooms[-3:]}) == 1
    assert twins.bodies.as_dict()["buckets"] == 2


def test_the_report() -> None:
    twins = llama_bodies()
    twins.steps(STEPS)
    assert str(twins.bodies).startswith("body graphs: 83% of 6 calls replayed; 2 graphs for 1 buckets; ")
    assert twins.kernels.report().as_dict()["capture"]["graphs"] == 2
    assert twins.kernels.report().ran == twins.eager_kernels.report().ran


def test_the_log_of_a_trainer(tmp_path: Path) -> None:
    """The first batch is compared with the model's own code, and the call after that is the first of its kind."""
    callback = NpuKernelsCallback(backend="torch", capture="on")
    trainer = make_trainer(tmp_path, small_model("llama", use_cache=False), [callback], max_steps=3, logging_steps=1)
    trainer.train()
    shares = [entry["bodies_replayed"] for entry in trainer.state.log_history if "loss" in entry]
    assert shares == [0, 1, 1]
