"""Each of transformers' processors inside of a step does to the scores what it does in `generate`."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from npu_trainer_kernels import completions
from npu_trainer_kernels.rollouts import sampling as sampling_module
from tests.models import small_model

from .common import alone, greedy, padded, prompts, sampled, served

WARPERS = [
    {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"typical_p": 0.6}, {"epsilon_cutoff": 0.003},
    {"eta_cutoff": 0.003}, {"temperature": 1.7, "top_k": 40, "top_p": 0.9}, {"repetition_penalty": 1.8},
    {"suppress_tokens": [7, 8, 9, 30]}, {"bad_words_ids": [[45], [168, 102], [48, 260, 273]]},
    {"sequence_bias": [[[12], 4.0], [[13, 14], 9.0]]}, {"remove_invalid_values": True}, {"renormalize_logits": True},
    {"forced_eos_token_id": 3},
]  # fmt: skip


def _likely(model):
    """Makes distributions of few tokens, so that all processors matter."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12)
    return model


@pytest.mark.parametrize("options", WARPERS, ids=str)
def test_drawn_tokens_are_those_of_generate(options):
    """The same seed draws the same tokens for prompts of equal lengths, unless a probability differs."""
    model, kernels, rollouts = served("llama")
    given = padded(prompts((8, 8, 8)))
    _likely(model)
    config = sampled(24, **options)
    torch.manual_seed(5)
    found = model.generate(**given, generation_config=config)
    assert rollouts.engine.rollouts == 1, str(rollouts)
    kernels.restore()
    torch.manual_seed(5)
    expected = model.generate(**given, generation_config=config)
    assert torch.equal(found, expected)
    if options != {"remove_invalid_values": True} and options != {"renormalize_logits": True}:
        torch.manual_seed(5)
        assert not torch.equal(model.generate(**given, generation_config=sampled(24)), expected)


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.8}, {"bad_words_ids": [[5], [9, 11]]}, {"suppress_tokens": [7, 8]},
     {"min_new_tokens": 6}, {"min_new_tokens": 3}],
    ids=str,
)  # fmt: skip
def test_greedy_tokens_of_unequal_prompts(options):
    """What a processor looks at is the row's own tokens, not padding, nor those of the row that had its place."""
    plain = _likely(small_model("llama").eval())
    first = alone(plain, prompts(), greedy(3, repetition_penalty=options.get("repetition_penalty", 1.0)))
    config = greedy(14, eos_token_id=[row[1] for row in first], **options)
    expected = alone(plain, prompts(), config)
    for most_rows in (None, 2):
        model, _, _ = served("llama", most_rows=most_rows)
        assert completions(_likely(model), prompts(), config)[0] == expected


def test_min_length_counts_the_prompt():
    """As in `generate` padding counts as well, so prompts have one length here."""
    plain = small_model("llama").eval()
    given = prompts((8, 8, 8))
    first = alone(plain, given, greedy(2))
    config = greedy(12, min_length=14, eos_token_id=[row[0] for row in first])
    model, _, rollouts = served("llama")
    assert completions(model, given, config)[0] == alone(plain, given, config)
    assert rollouts.engine.rollouts == 1


class _Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_an_unknown_processor_is_named():
    model, _, rollouts = served("llama")
    model.generate(**padded(prompts()), generation_config=greedy(3), logits_processor=LogitsProcessorList([_Own()]))
    assert list(rollouts.engine.reasons) == ["_Own processes its scores"]


def test_a_processor_whose_code_was_replaced(monkeypatch):
    model, _, rollouts = served("llama")
    own, calls = TemperatureLogitsWarper.__call__, []

    def counts(self, input_ids, scores):
        calls.append(1)
        return own(self, input_ids, scores)

    monkeypatch.setattr(TemperatureLogitsWarper, "__call__", counts)
    model.generate(**padded(prompts()), generation_config=sampled(3, temperature=0.5))
    assert len(calls) == 3
    assert list(rollouts.engine.reasons) == ["other code is the __call__ of TemperatureLogitsWarper"]


def test_a_step_is_captured_anew_for_other_options():
    model, _, _ = served("llama", keep=True)
    plain = small_model("llama").eval()
    for options in ({}, {"repetition_penalty": 1.5}, {"repetition_penalty": 2.5}, {"bad_words_ids": [[5]]}, {}):
        config = greedy(8, **options)
        assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)


@pytest.mark.parametrize("fault", ["top_p", "tail", "ids"])
def test_a_planted_fault_is_seen(monkeypatch, fault):
    """Top-p that cuts at another place, last ids that are not counted, ids of the row before: other tokens."""
    options = {"top_p": {"top_p": 0.7}, "tail": {"bad_words_ids": [[9, 11]]}, "ids": {"repetition_penalty": 1.8}}[fault]
    if fault == "top_p":
        kind = sampling_module.hf.TopPLogitsWarper
        original = sampling_module._BY_CONSTANTS[kind]

        def smaller(each):
            other = copy.copy(each)
            other.top_p -= 0.1
            return original(other)

        monkeypatch.setitem(sampling_module._BY_CONSTANTS, kind, smaller)
    else:
        from npu_trainer_kernels.rollouts.decode import Rows

        original_make = Rows.make.__func__

        def make(cls, *args):
            rows = original_make(cls, *args)
            setattr(rows, fault, None if getattr(rows, fault) is None else getattr(rows, fault).clone())
            return rows

        monkeypatch.setattr(Rows, "make", classmethod(make))
        choose = Rows.choose

        def forgets(self, logits, active, how):
            kept = getattr(self, fault).clone()
            choose(self, logits, active, how)
            getattr(self, fault).copy_(kept)

        monkeypatch.setattr(Rows, "choose", forgets)
    plain = _likely(small_model("llama").eval())
    given = prompts((8, 8, 8))
    if fault == "tail":
        row = alone(plain, given, greedy(6))[0]
        options = {"bad_words_ids": [row[2:4]]}
    model, kernels, _ = served("llama")
    _likely(model)
    config = sampled(24, **options) if fault == "top_p" else greedy(24, **options)
    torch.manual_seed(5)
    found = model.generate(**padded(given), generation_config=config)
    kernels.restore()
    torch.manual_seed(5)
    assert not torch.equal(found, model.generate(**padded(given), generation_config=config))


def test_nothing_ends_a_row():
    with pytest.raises(sampling_module.Refused, match="no length ends a row"):
        sampling_module.sampling_of([], [], GenerationConfig(), 4, [4], 10, torch.device("cpu"))
