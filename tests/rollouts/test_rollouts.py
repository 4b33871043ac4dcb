"""Completions by captured steps: the tokens of `generate`, in all kinds of batches, modes and states of a model."""

import copy
import functools
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from npu_trainer_kernels import apply_npu_kernels, completions, serve_rollouts
from npu_trainer_kernels.capture import captured_function
from npu_trainer_kernels.patching.modules import norm_forms
from npu_trainer_kernels.rollouts import decode, turns
from npu_trainer_kernels.rollouts import rollout_cache as cache_module
from npu_trainer_kernels.rollouts import rollout_engine as engine
from npu_trainer_kernels.rollouts.weights import Weights
from tests.closeness import assert_as_close, rounded
from tests.models import small_model

from .common import LENGTHS, alone, greedy, padded, prompts, sampled, served

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": WINDOWS,
    "gemma3": WINDOWS,
    "phi3": {},
    "cohere": {},
}


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_each_prompt_alone(family):
    model, kernels, rollouts = served(family, **FAMILIES[family])
    config = greedy(16)
    expected = alone(small_model(family, **FAMILIES[family]).eval(), prompts(), config)
    found = model.generate(**padded(prompts()), generation_config=config)[:, max(LENGTHS) :]
    # The family's own end, where it has one, is followed by padding.
    assert [row[: len(each)] for row, each in zip(found.tolist(), expected, strict=True)] == expected
    assert not any(any(row[len(each) :]) for row, each in zip(found.tolist(), expected, strict=True))
    assert (rollouts.engine.rollouts, rollouts.engine.tokens) == (1, sum(map(len, expected))), str(rollouts)
    kernels.restore()
    assert model.generate(torch.tensor([prompts()[0]]), generation_config=config)[0, 12:].tolist() == expected[0]


@pytest.mark.parametrize("most_rows", [None, 1, 2, 5])
def test_rows_that_wait_take_the_places_of_rows_that_have_ended(most_rows):
    model, _, rollouts = served("llama", most_rows=most_rows)
    first = alone(model_alone := small_model("llama").eval(), prompts(), greedy(16))
    ends = [row[3 + i] for i, row in enumerate(first[:4])]  # rows end after other numbers of tokens
    config = greedy(16, eos_token_id=ends)
    expected = alone(model_alone, prompts(), config)
    assert len({len(row) for row in expected}) > 2
    for _ in range(2):
        assert completions(model, prompts(), config)[0] == expected
    assert rollouts.engine.rollouts == 2


def test_a_row_that_ends_at_once_and_one_row_alone():
    model, _, _ = served("llama")
    plain = small_model("llama").eval()
    first = alone(plain, prompts(), greedy(1))
    config = greedy(8, eos_token_id=first[0][0])
    assert completions(model, prompts()[:1], config)[0] == [first[0]]
    assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)
    assert completions(model, prompts(), greedy(1))[0] == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drawn_tokens_are_those_of_generate_with_the_same_seed(dtype):
    """Prompts of equal lengths: `generate` draws the same noise for the same probabilities."""
    model, kernels, rollouts = served("llama", dtype=dtype)
    given = padded(prompts((9, 9, 9)))
    torch.manual_seed(3)
    found = model.generate(**given, generation_config=sampled(10))
    after = torch.rand(1)
    assert rollouts.engine.rollouts == 1
    kernels.restore()
    torch.manual_seed(3)
    expected = model.generate(**given, generation_config=sampled(10))
    if dtype is torch.float32:
        assert found.tolist() == expected.tolist()
    assert torch.equal(after, torch.rand(1))


def test_the_frequencies_of_drawn_tokens():
    model, _, _ = served("llama", vocab_size=24)
    prompt, count = [5, 6, 7], 4000
    torch.manual_seed(0)
    rows, _ = completions(model, [prompt] * count, sampled(2, temperature=0.7))
    with torch.no_grad():
        p = (small_model("llama", vocab_size=24).eval()(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    seen = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=24) / count
    # Seven standard deviations of each frequency.
    assert ((seen - p).abs() < 7 * (p * (1 - p) / count).sqrt() + 1e-9).all()


def test_log_probabilities_are_those_of_the_models_forward():
    model, _, _ = served("qwen3")
    config = sampled(10, temperature=0.8, eos_token_id=[4, 9, 17])
    torch.manual_seed(1)
    rows, found = completions(model, prompts(), config, logprobs=True)
    plain = small_model("qwen3").eval()
    exact = copy.deepcopy(plain).double()
    for prompt, row, logprobs in zip(prompts(), rows, found, strict=True):

        def of(model, prompt=prompt, row=row):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1] / 0.8
            return logits.log_softmax(-1).gather(1, torch.tensor(row)[:, None])[:, 0]

        assert_as_close(
            torch.tensor(logprobs), of(plain), of(exact), "log-probabilities", rounded(functools.partial(of, plain))
        )


# ---------------------------------------------------------------------------------------------------------------------
# What a graph remembers
# ---------------------------------------------------------------------------------------------------------------------


def test_the_step_is_kept_and_reads_the_weights_as_they_are():
    model, _, rollouts = served("llama", keep=True)
    config = greedy(10)
    completions(model, prompts(), config)
    step = rollouts.engine.step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        model.train()(
            input_ids=torch.tensor([prompts(seed=seed)[0]]), labels=torch.tensor([prompts(seed=seed)[0]])
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        plain = small_model("llama").eval()
        plain.load_state_dict(model.state_dict())
        given = prompts(seed=seed + 5)
        assert completions(model, given, config)[0] == alone(plain, given, config)
        assert rollouts.engine.step is step


def test_autocast_casts_once_a_rollout():
    model, _, rollouts = served("qwen3", tie_word_embeddings=True, keep=True)
    plain, config = small_model("qwen3", tie_word_embeddings=True).eval(), greedy(8)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            found = completions(model, prompts(), config)[0]
            assert found == alone(plain, prompts(), config)
        with torch.no_grad():
            for each in (model, plain):
                each.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    copied = {name for _, name, p, c in rollouts.engine._copies._copies if c.dtype is torch.bfloat16}
    assert copied == {"weight"}
    assert len(rollouts.engine._copies._copies) == 15  # seven linear layers in each of two, and the head
    assert model.model.layers[0].mlp.down_proj.weight.dtype is torch.float32


def _looks(monkeypatch):
    """Returns a list with an entry for each time that uses of weights, or the form of a norm, are found out."""
    found = []
    looking, recognise = Weights.looking, norm_forms._recognise
    monkeypatch.setattr(Weights, "looking", lambda self, model: (found.append("weights"), looking(self, model))[1])
    monkeypatch.setattr(norm_forms, "_recognise", lambda module: (found.append("norms"), recognise(module))[1])
    return found


def test_what_a_rollout_finds_out_is_known_to_the_next_ones(monkeypatch):
    found = _looks(monkeypatch)
    model, _, _ = served("qwen3")
    plain, config = small_model("qwen3").eval(), greedy(8)
    found.clear()
    assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)
    assert sorted(set(found)) == ["norms", "weights"]
    found.clear()
    for seed in (7, 8):
        with torch.no_grad():
            for each in (model, plain):
                each.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        given = prompts(seed=seed)
        assert completions(model, given, config)[0] == alone(plain, given, config)
    assert not found


def _tied(model):
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight


def _other_weights(model):
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(2 * layer.up_proj.weight.detach())


@pytest.mark.parametrize("change", [_tied, _other_weights])
def test_a_changed_model_is_looked_at_again(monkeypatch, change):
    found = _looks(monkeypatch)
    model, _, _ = served("qwen3")
    plain, config = small_model("qwen3").eval(), greedy(8)
    completions(model, prompts(), config)
    found.clear()
    for each in (model, plain):
        change(each)
    assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)
    assert "weights" in found


def test_autocast_is_looked_at_again(monkeypatch):
    found = _looks(monkeypatch)
    model, _, _ = served("qwen3")
    plain, config = small_model("qwen3").eval(), greedy(8)
    for cast, is_new in ((False, True), (True, True), (False, False)):
        found.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)
        assert ("weights" in found) is is_new


def test_nothing_is_kept_unless_it_is_asked_for():
    model, _, rollouts = served("llama")
    completions(model, prompts(), greedy(4))
    assert rollouts.engine.step is None
    with pytest.raises(ValueError, match="keep must be true or false"):
        serve_rollouts(apply_npu_kernels(small_model("llama"), backend="torch"), keep="yes")


def test_a_step_that_is_captured_again_is_not_looked_at_again(monkeypatch):
    torch.manual_seed(0)
    base = small_model("llama").eval()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    plain = copy.deepcopy(model.eval())
    rollouts = serve_rollouts(apply_npu_kernels(model, backend="torch"))
    looks, own = [], captured_function._look
    monkeypatch.setattr(captured_function, "_look", lambda *args: (looks.append(1), own(*args))[1])

    def looked(config):
        before = len(looks)
        assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)
        return len(looks) - before

    assert [looked(greedy(8)) for _ in range(3)] == [1, 0, 0]
    with model.disable_adapter(), plain.disable_adapter():
        assert [looked(greedy(8)) for _ in range(2)] == [1, 0]
    assert [looked(greedy(8)) for _ in range(2)] == [0, 0]  # a state that is known
    with torch.no_grad():
        for each in (model, plain):  # in place, as an optimizer does
            for p in each.parameters():
                p.mul_(0.9)
    assert looked(greedy(8)) == 0
    assert looked(greedy(9)) == 1
    for each in (model, plain):
        each.to(torch.float64).to(torch.float32)
    assert looked(greedy(9)) == 1
    assert rollouts.engine.step is None


def test_adapters():
    torch.manual_seed(0)
    base = small_model("llama").eval()
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )
    model.eval()
    plain = copy.deepcopy(model)
    rollouts = serve_rollouts(apply_npu_kernels(model, backend="torch"), keep=True)
    config = greedy(8)

    def same():
        assert completions(model, prompts(), config)[0] == alone(plain, prompts(), config)

    same()
    same()
    with model.disable_adapter(), plain.disable_adapter():
        same()
    same()
    for each in (model, plain):
        each.merge_adapter()
    same()
    for each in (model, plain):
        each.unmerge_adapter()
    same()
    for each in (model, plain):
        each.to(torch.float64).to(torch.float32)
    same()
    assert rollouts.engine.rollouts == 7, str(rollouts)


def test_training_mode_and_checkpointing():
    model, _, rollouts = served("llama")
    model.train()
    model.gradient_checkpointing_enable()
    config = greedy(8)
    expected = alone(small_model("llama").eval(), prompts(), config)
    model.gradient_checkpointing_disable()  # as TRL does around generation
    assert completions(model, prompts(), config)[0] == expected
    model.config.use_cache = False
    model.generation_config.use_cache = False
    assert completions(model, prompts(), config)[0] == expected
    assert rollouts.engine.rollouts == 2


def test_dropout_is_left_to_generate():
    model, _, rollouts = served("llama", attention_dropout=0.1)
    model.train()
    with pytest.raises(ValueError, match="its attention drops out"):
        completions(model, prompts(), greedy(8))
    assert rollouts.engine.rollouts == 0


# ---------------------------------------------------------------------------------------------------------------------
# What is left to `generate`
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, None),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is asked for"),
        ({"max_time": 100.0}, "MaxTimeCriteria decides when a row ends"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor processes its scores"),
        ({"cache_implementation": "static"}, "it is given a cache (StaticCache)"),
    ],
    ids=str,
)
def test_other_ways_to_generate(options, reason):
    model, _, rollouts = served("llama")
    given, config = padded(prompts()), greedy(8, **options)
    expected = small_model("llama").eval().generate(**given, generation_config=copy.deepcopy(config))
    found = model.generate(**given, generation_config=config)
    if reason == "output_scores is asked for":
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected)
    assert list(rollouts.engine.reasons) == ([] if reason is None else [reason])


def test_an_output_with_names():
    model, _, rollouts = served("llama")
    plain = small_model("llama").eval()
    found = model.generate(**padded(prompts((6, 6))), generation_config=greedy(5, return_dict_in_generate=True))
    assert torch.equal(found.sequences, plain.generate(**padded(prompts((6, 6))), generation_config=greedy(5)))
    assert rollouts.engine.rollouts == 1


def test_padding_on_the_right_and_other_positions():
    model, _, rollouts = served("llama")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    model.generate(ids, attention_mask=(ids > 0).long(), generation_config=greedy(4))
    model.generate(ids[:1], position_ids=torch.tensor([[0, 2, 4, 6]]), generation_config=greedy(1))
    model.generate(inputs_embeds=torch.randn(1, 3, model.config.hidden_size), generation_config=greedy(2))
    assert list(rollouts.engine.reasons) == [
        "its prompts are padded on the right", "its position ids do not count its tokens", "it is given inputs_embeds",
    ]  # fmt: skip
    assert rollouts.engine.rollouts == 0


def test_continuous_batching_is_as_without_the_kernels():
    model, kernels, rollouts = served("qwen3")
    config = greedy(6, eos_token_id=1)

    def batched():
        found = model.generate_batch(prompts(), generation_config=copy.deepcopy(config), progress_bar=False)
        return sorted(tuple(each.prompt_ids + each.generated_tokens) for each in found.values())

    with_kernels = batched()
    assert rollouts.engine.rollouts == 0
    kernels.restore()
    assert with_kernels == batched()
    assert with_kernels == sorted(
        (*prompt, *row) for prompt, row in zip(prompts(), alone(model, prompts(), config), strict=True)
    )


def test_auto_asks_for_long_completions():
    model, _, rollouts = served("llama")
    rollouts.always = False
    model.generate(**padded(prompts()), generation_config=greedy(31))
    assert list(rollouts.engine.reasons) == ["fewer than 32 tokens are asked for"]
    model.generate(**padded(prompts()), generation_config=greedy(32))
    assert rollouts.engine.rollouts == 1


def test_a_rollout_without_room_does_not_refuse_a_shorter_one(monkeypatch):
    model, _, rollouts = served("llama")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "free_bytes", lambda where, parts: 1)
        with pytest.raises(ValueError, match="its caches do not fit into the device's memory"):
            completions(model, prompts(), greedy(4))
    assert rollouts.engine.rollouts == 0
    completions(model, prompts(), greedy(4))
    assert rollouts.engine.rollouts == 1


def test_a_copy_of_the_model_generates_by_itself():
    model, _, rollouts = served("llama")
    other = copy.deepcopy(model)
    other.generate(**padded(prompts()), generation_config=greedy(4))
    assert (rollouts.engine.rollouts, sum(rollouts.engine.reasons.values())) == (0, 0)


@pytest.mark.parametrize("mode", ["yes", None, True])
def test_a_wrong_mode(mode):
    kernels = apply_npu_kernels(small_model("llama"), backend="torch")
    with pytest.raises(ValueError, match="mode must be one of auto, on, off; got"):
        serve_rollouts(kernels, mode)


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_a_wrong_number_of_rows(rows):
    kernels = apply_npu_kernels(small_model("llama"), backend="torch")
    with pytest.raises(ValueError, match="most_rows must be a positive number, or None; got"):
        serve_rollouts(kernels, most_rows=rows)


def test_wrong_calls():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, backend="torch")
    with pytest.raises(ValueError, match="must have kernels that serve_rollouts was called for"):
        completions(model, prompts(), greedy())
    assert serve_rollouts(kernels, "off") is None
    serve_rollouts(kernels)
    for given in ([], [[3], []]):
        with pytest.raises(ValueError, match="prompts must be non-empty lists of ids"):
            completions(model, given, greedy())
    with pytest.raises(ValueError, match="cannot be generated by captured steps: MaxTimeCriteria"):
        completions(model, prompts(), greedy(max_time=5.0))
    kernels.restore()
    with pytest.raises(RuntimeError, match="these kernels were restored"):
        serve_rollouts(kernels)


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults: the first rollout's comparison sees them, or the tokens differ
# ---------------------------------------------------------------------------------------------------------------------


def _reason_of(model):
    with pytest.raises(ValueError, match="cannot be generated by captured steps") as caught:
        completions(model, prompts(), greedy(8))
    return str(caught.value)


def test_a_wrong_position_is_seen(monkeypatch):
    original = decode.Step.__init__

    def shifted(self, model, *args, **options):
        forward = model.forward

        def call(*positional, position_ids, **kwargs):
            more = 1 if position_ids.shape[1] == 1 and len(position_ids) > 1 else 0
            return forward(*positional, position_ids=position_ids + more, **kwargs)

        model.forward = call
        try:
            original(self, model, *args, **options)
        finally:
            del model.forward

    monkeypatch.setattr(decode.Step, "__init__", shifted)
    assert "its logits differ from those of its own forward" in _reason_of(served("llama")[0])


def test_a_prompt_of_another_row_is_seen(monkeypatch):
    original = cache_module.Places.__init__

    def exchanged(self, given, where):
        rows = [rows for _, rows in given]
        original(self, [(n, other) for (n, _), other in zip(given, rows[1:] + rows[:1], strict=True)], where)

    monkeypatch.setattr(turns, "Places", type("Places", (cache_module.Places,), {"__init__": exchanged}))
    assert "its logits differ from those of its own forward" in _reason_of(served("llama")[0])


def _write_nothing(monkeypatch):
    at_once = cache_module.qk_norm_rope_append

    def unwritten(*given, **options):
        *others, places = given
        return at_once(*others, torch.full_like(places, -1), **options)

    monkeypatch.setattr(cache_module, "qk_norm_rope_append", unwritten)
    monkeypatch.setattr(cache_module, "append_to_cache", lambda *args, **kwargs: None)


# Llama's keys are rotated and written at once; Cohere rotates interleaved pairs, by another launch.
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_a_key_that_is_not_written_is_seen(family, monkeypatch):
    _write_nothing(monkeypatch)
    assert "its logits differ from those of its own forward" in _reason_of(served(family)[0])


def test_a_length_that_is_not_counted_is_seen(monkeypatch):
    original = cache_module.decode_attention
    monkeypatch.setattr(
        cache_module, "decode_attention",
        lambda q, keys, values, lengths, **options: original(q, keys, values, (lengths - 1).clamp(min=0), **options),
    )  # fmt: skip
    assert "its logits differ from those of its own forward" in _reason_of(served("llama")[0])


def test_what_is_refused_once_is_not_tried_again(monkeypatch):
    _write_nothing(monkeypatch)
    model, _, rollouts = served("llama")
    plain = small_model("llama").eval()
    for _ in range(2):
        torch.manual_seed(2)
        found = model.generate(**padded(prompts((6, 6))), generation_config=sampled(6))
        torch.manual_seed(2)
        assert torch.equal(found, plain.generate(**padded(prompts((6, 6))), generation_config=sampled(6)))
    assert sum(rollouts.engine.reasons.values()) == 2
    assert rollouts.engine.capturing > 0
    once = rollouts.engine.capturing
    model.generate(**padded(prompts((6, 6))), generation_config=sampled(6))
    assert rollouts.engine.capturing == once


def test_noise_that_is_not_drawn_anew_is_seen_in_frequencies(monkeypatch):
    """The test of frequencies is one of first tokens; this is its counterpart for later ones."""
    model, _, _ = served("llama", vocab_size=24)
    monkeypatch.setattr(decode.Step, "replay", _without_noise)
    torch.manual_seed(0)
    rows, _ = completions(model, [[5, 6, 7]] * 400, sampled(3, temperature=50.0))
    pairs = list(itertools.chain.from_iterable(itertools.pairwise(row) for row in rows))
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.9  # with noise of its own: one in 24


def _without_noise(self):
    return self._captured.replay()[0]


def test_later_tokens_have_noise_of_their_own():
    model, _, _ = served("llama", vocab_size=24)
    torch.manual_seed(0)
    rows, _ = completions(model, [[5, 6, 7]] * 400, sampled(3, temperature=50.0))
    pairs = list(itertools.chain.from_iterable(itertools.pairwise(row) for row in rows))
    assert sum(a == b for a, b in pairs) / len(pairs) < 0.12


def test_the_report_counts():
    model, kernels, _ = served("llama")
    assert "rollouts by captured steps: none yet" in str(kernels.report())
    rows, _ = completions(model, prompts(), greedy(4))
    tokens = sum(map(len, rows))
    model.generate(**padded(prompts()), generation_config=greedy(4, max_time=9.0))
    text = str(kernels.report())
    assert f"rollouts by captured steps: 1 of 2 ({tokens} tokens in" in text
    assert "1 by generate: MaxTimeCriteria decides when a row ends" in text
    found = kernels.report().as_dict()["rollouts"]
    assert (found["rollouts"], found["tokens"]) == (1, tokens)
