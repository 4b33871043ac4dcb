"""The rows of a GRPO prompt in one micro-batch, and micro-batches of one length: the optimizer's step stays TRL's;
where it would not, the rows stay."""

import dataclasses
import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import Trainer
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments
from npu_trainer_kernels.training import grpo_groups
from npu_trainer_kernels.training.grpo_groups import Arranger, stays_shuffled
from tests.models import small_model
from tests.training.test_grpo import difference, train
from tests.training.test_grpo_plan import LOSS_TYPES

# Four micro-batches of four rows, four prompts of four rows each: every one is in several when TRL has shuffled them.
WINDOW = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": 30}
ONLY = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_ops=["varlen_attention"])
UNBALANCED = dataclasses.replace(ONLY, npu_kernels_balance=False)


class MadeUp:
    """Completions of made-up tokens, of lengths that differ as much as they can."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not hasattr(self, "dice"):
            self.dice = random.Random(5)
        lengths = [self.dice.choice((1, 3, 29)) for _ in prompt_ids]
        return [[self.dice.randrange(4, 16) for _ in range(n)] + [2] for n in lengths], None


@pytest.fixture
def seen(monkeypatch):
    """Prompt, completion and advantage of the rows of every micro-batch whose loss was computed."""
    batches = []
    compute_loss = TrlGRPOTrainer._compute_loss

    @functools.wraps(compute_loss)
    def spy(self, model, inputs):
        rows = zip(*(inputs[name].tolist() for name in ("prompt_ids", "completion_ids", "advantages")), strict=True)
        batches.append([(tuple(p), tuple(c), a) for p, c, a in rows])
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(TrlGRPOTrainer, "_compute_loss", spy)
    return batches


def trained(cls, tmp_path, seen, kernels=None, **options):
    """A trained trainer, and what its micro-batches were."""
    seen.clear()
    torch.manual_seed(0)
    extra = {} if kernels is None else {"npu_kernels": kernels}
    trainer = train(type(cls.__name__, (MadeUp, cls), {}), tmp_path, **{**WINDOW, "max_steps": 2, **options}, **extra)
    return trainer, list(seen)


def prompts(batch):
    return {prompt for prompt, *_ in batch}


def assert_same_step(stock, ours, family="qwen3"):
    """Gradients add up in another order, and to the same."""
    moved = difference(stock.model, small_model(family))
    assert moved > 1e-3
    assert difference(stock.model, ours.model) < 1e-4 * moved
    for before, after in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            if name in before:
                assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name


ALONE = [
    *({"loss_type": loss_type} for loss_type in LOSS_TYPES if loss_type != "bnpo"),
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    {"loss_type": "dapo", "num_iterations": 2, "beta": 0.1, "epsilon": 0.001},
    {"loss_type": "dapo", "gradient_accumulation_steps": 8, "steps_per_generation": 4},
    {"loss_type": "grpo", "gradient_accumulation_steps": 8, "steps_per_generation": 4, "num_iterations": 2},
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.001, "num_iterations": 2},
    {"loss_type": "dr_grpo", "num_generations": 8},
    {"loss_type": "dapo", "mask_truncated_completions": True, "gradient_checkpointing": True},
]


@pytest.mark.parametrize(
    ("options", "kernels"),
    [*((options, ONLY) for options in ALONE), (ALONE[0], UNBALANCED)],
    ids=lambda value: str(value) if isinstance(value, dict) else f"balance={value.npu_kernels_balance}",
)
def test_a_prompt_is_in_as_few_micro_batches_as_hold_it(tmp_path, seen, options, kernels):
    stock, shuffled = trained(TrlGRPOTrainer, tmp_path, seen, **options)
    ours, grouped = trained(GRPOTrainer, tmp_path, seen, kernels, **options)
    assert max(len(prompts(batch)) for batch in shuffled) > 1
    assert [len(prompts(batch)) for batch in grouped] == [1] * len(shuffled)
    # Each generation batch has the rows that it had, with what belongs to them.
    slices = options.get("steps_per_generation", options.get("gradient_accumulation_steps", 4))
    for i in range(0, len(shuffled), slices):
        before, after = (sorted(itertools.chain(*batches[i : i + slices])) for batches in (shuffled, grouped))
        assert after == before
    assert_same_step(stock, ours)
    assert "_prepare_inputs" not in vars(ours)
    assert "micro-batches" not in str(ours.npu_kernels_report())


PARTS = [
    {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"loss_type": "grpo", "gradient_accumulation_steps": 6, "steps_per_generation": 4, "max_steps": 4},
]


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_a_step_of_a_part_of_what_is_generated_keeps_its_rows(tmp_path, seen, options):
    """Two micro-batches in a row are in one step, in which rows may move. In the second case an epoch of 16 ends with a
    step of four, and the next goes on with six."""
    stock, shuffled = trained(TrlGRPOTrainer, tmp_path, seen, **options)
    ours, grouped = trained(GRPOTrainer, tmp_path, seen, ONLY, **options)
    assert grouped != shuffled
    assert len(grouped) == len(shuffled)
    for i in range(0, len(shuffled), 2):
        assert sorted(itertools.chain(*grouped[i : i + 2])) == sorted(itertools.chain(*shuffled[i : i + 2]))
    assert_same_step(stock, ours)


def test_micro_batches_of_one_length(tmp_path, seen):
    """Prompts of four tokens, so that sharing them saves next to nothing: prompts of two rows leave room to balance."""
    options = {"num_generations": 2, "loss_type": "dapo", "max_steps": 4}
    stock, shuffled = trained(TrlGRPOTrainer, tmp_path, seen, **options)
    ours, even = trained(GRPOTrainer, tmp_path, seen, ONLY, **options)
    assert_same_step(stock, ours)

    def longest_over_mean(batches):
        """As in `live`, from what the loss was given."""
        lengths = []
        for batch in batches:
            prompts = [sum(i > 0 for i in prompt) for prompt, *_ in batch]
            whole = sum(prompts) + sum(i > 0 for _, completion, _ in batch for i in completion)
            saved = sum(prompts) - sum(sum(i > 0 for i in prompt) for prompt in {prompt for prompt, *_ in batch})
            lengths.append(whole - saved if saved >= 0.1 * whole else whole)
        return max(lengths) * len(lengths) / sum(lengths)

    logged = [log for log in ours.state.log_history if "imbalance/micro_batches" in log]
    for suffix, batches in (("", even), ("_shuffled", shuffled)):
        windows = [longest_over_mean(batches[i : i + 4]) for i in range(0, 16, 4)]
        assert [log[f"imbalance/micro_batches{suffix}"] for log in logged] == pytest.approx(windows)
    assert sum(log["imbalance/micro_batches"] for log in logged) < sum(
        log["imbalance/micro_batches_shuffled"] for log in logged
    )
    assert "imbalance/ranks" not in logged[0]


def test_switched_off_no_length_is_looked_at(tmp_path, seen):
    ours, _ = trained(GRPOTrainer, tmp_path, seen, UNBALANCED)
    assert not [name for log in ours.state.log_history for name in log if name.startswith("imbalance")]


def test_training_that_goes_on_within_a_step_leaves_rows(tmp_path, seen, monkeypatch):
    monkeypatch.setattr(Trainer, "train", within(Trainer.train))
    ours, _ = trained(GRPOTrainer, tmp_path, seen, ONLY)
    assert "training goes on with micro-batch 2 of the 4 generated at a time" in str(ours.npu_kernels_report())


def within(train):
    """As after an exception in the second micro-batch of a step."""

    def wrapped(self, *args, **kwargs):
        self._step = 1
        return train(self, *args, **kwargs)

    return wrapped


def test_prompts_are_still_shuffled(tmp_path, seen):
    _, grouped = trained(GRPOTrainer, tmp_path, seen, UNBALANCED, max_steps=4)
    _, shuffled = trained(TrlGRPOTrainer, tmp_path, seen, max_steps=4)
    # A generation batch may have a prompt of the data twice.
    turns = [tuple(dict.fromkeys(next(iter(prompts(b))) for b in grouped[i : i + 4])) for i in range(0, 16, 4)]
    # Each in the order in which TRL's shuffling brings up the first row of each prompt.
    for i, turn in enumerate(turns):
        rows = [prompt for batch in shuffled[4 * i : 4 * i + 4] for prompt, *_ in batch]
        assert turn == tuple(dict.fromkeys(rows))
    assert len(set(turns)) > 1


TOGETHER = [
    ({"loss_type": "bnpo"}, "loss_type='bnpo' divides by the tokens of a micro-batch"),
    ({"loss_type": "dapo", "entropy_coef": 0.1}, "the entropy bonus is a mean over the tokens of a micro-batch"),
    ({"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_max": 0.2}, "the entropy bonus"),
    ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 compares the tokens of a micro-batch"),
    ({"family": "qwen3-moe"}, "the auxiliary loss of the experts looks at a micro-batch as a whole"),
    (
        {"gradient_accumulation_steps": 1, "steps_per_generation": 4},
        "an optimizer step takes 1 micro-batches of the 4 that are generated at a time",
    ),
    ({"gradient_accumulation_steps": 3, "steps_per_generation": 4}, "an optimizer step takes 3 micro-batches"),
]


@pytest.mark.parametrize(("options", "reason"), TOGETHER, ids=str)
def test_rows_stay_where_the_rows_beside_them_count(tmp_path, seen, options, reason):
    stock, shuffled = trained(TrlGRPOTrainer, tmp_path, seen, **options)
    ours, same = trained(GRPOTrainer, tmp_path, seen, ONLY, **options)
    assert same == shuffled
    assert_same_step(stock, ours, options.get("family", "qwen3"))
    assert reason in str(ours.npu_kernels_report())


@pytest.mark.parametrize(
    "options", [{"loss_type": "bnpo"}, {"entropy_coef": 1.0}, {"top_entropy_quantile": 0.5}], ids=str
)
def test_for_these_the_step_would_be_another(tmp_path, seen, monkeypatch, options):
    """The reasons above are none too many: brought together all the same, the rows give another step."""
    stock, _ = trained(TrlGRPOTrainer, tmp_path, seen, **options)
    monkeypatch.setattr(grpo_groups, "compares_rows", lambda trainer: None)
    ours, grouped = trained(GRPOTrainer, tmp_path, seen, ONLY, **options)
    assert [len(prompts(batch)) for batch in grouped] == [1] * len(grouped)
    assert difference(stock.model, ours.model) > 1e-3 * difference(stock.model, small_model("qwen3"))


@pytest.mark.parametrize("ops", [["rms_norm", "linear_logprob"], ["varlen_attention"]])
def test_without_the_op_nothing_is_touched(tmp_path, seen, ops):
    _, shuffled = trained(TrlGRPOTrainer, tmp_path, seen)
    kernels = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_ops=ops)
    ours, rows = trained(GRPOTrainer, tmp_path, seen, kernels)
    assert (rows == shuffled) == ("varlen_attention" not in ops)
    assert not [note for note in ours.npu_kernels_report().notes if "rows" in note]


def test_dropout_leaves_rows_as_they_are(tmp_path, seen):
    """Then no beginning is shared, and there is nothing to gain."""
    from peft import LoraConfig

    lora = LoraConfig(target_modules=["q_proj"], r=4, lora_dropout=0.1)
    _, shuffled = trained(TrlGRPOTrainer, tmp_path, seen, extra={"peft_config": lora})
    ours, rows = trained(GRPOTrainer, tmp_path, seen, ONLY, extra={"peft_config": lora})
    # After the first step the random numbers of dropout are others.
    assert rows[:4] == shuffled[:4]
    assert "note: rows stay as TRL has shuffled them" in str(ours.npu_kernels_report())


@pytest.mark.parametrize(
    "name", ["_compute_loss", "compute_loss", "_get_per_token_logps_and_entropies", "_prepare_inputs", "training_step"]
)
def test_a_subclass_with_code_of_its_own_keeps_its_rows(tmp_path, seen, name):
    def same(self, *args, **kwargs):
        return getattr(TrlGRPOTrainer, name)(self, *args, **kwargs)

    _, shuffled = trained(TrlGRPOTrainer, tmp_path, seen)
    ours, rows = trained(type("Own", (GRPOTrainer,), {name: same}), tmp_path, seen, ONLY)
    assert rows == shuffled
    assert f"stay spread over micro-batches: Own has a {name} of its own" in str(ours.npu_kernels_report())


@pytest.mark.parametrize(
    ("where", "name"), [("trainer", "compute_loss"), ("trainer", "training_step"), ("class", "_compute_loss")]
)
def test_code_that_somebody_has_set_keeps_the_rows(tmp_path, seen, monkeypatch, where, name):
    original = getattr(TrlGRPOTrainer, name)

    class Set(GRPOTrainer):
        def train(self, *args, **kwargs):
            if where == "trainer":
                method = getattr(self, name)
                monkeypatch.setattr(self, name, lambda *a, **k: method(*a, **k))
            else:
                monkeypatch.setattr(TrlGRPOTrainer, name, lambda *a, **k: original(*a, **k))
            return super().train(*args, **kwargs)

    _, shuffled = trained(TrlGRPOTrainer, tmp_path, seen)
    ours, rows = trained(Set, tmp_path, seen, ONLY)
    assert rows == shuffled
    assert f"stay spread over micro-batches: Set has a {name} of its own" in str(ours.npu_kernels_report())


def test_rows_with_pictures_are_left_alone():
    batches = [{"prompt_ids": torch.tensor([[1], [2]]), "pixel_values": torch.zeros(3, 2)}] * 2
    assert Arranger(None, balance=True, across=False, note=print).arrange(batches) is batches


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "MULTI_NPU"])
@pytest.mark.parametrize("data_ranks", [2, 4])
def test_rows_change_ranks_only_where_ranks_share_data_alone(kind, data_ranks):
    """Of four ranks with two micro-batches of three rows each."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=2),
        accelerator=SimpleNamespace(distributed_type=DistributedType[kind], num_processes=4),
        _train_batch_size=3,
        get_total_train_batch_size=lambda args: 3 * 2 * data_ranks,
    )
    reason = grpo_groups.stays_on_rank(trainer)
    if kind == "MEGATRON_LM":
        assert reason == "ranks under MEGATRON_LM may share more than data"
    elif data_ranks == 2:
        assert "parts of the same rows" in reason
    else:
        assert reason is None


def test_ligers_loss_is_not_looked_into():
    trainer = object.__new__(TrlGRPOTrainer)
    trainer.args = SimpleNamespace(use_liger_kernel=True)
    assert stays_shuffled(trainer, across=False) == "Liger's loss takes the place of TRL's in some versions"
