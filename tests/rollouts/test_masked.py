"""Captured steps of models whose own code attends, with a mask of each row: biases by position, chunks, scores of one's
own. Whatever such code does with its mask, the tokens are those of `generate`, or the model is left to it."""

import copy
import threading

import pytest
import torch
from torch.distributions import Distribution, Normal
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, create_chunked_causal_mask

from npu_trainer_kernels import apply_npu_kernels, completions, serve_rollouts
from npu_trainer_kernels.patching.body import Unserved
from npu_trainer_kernels.rollouts import decode, turns
from npu_trainer_kernels.rollouts import rollout_cache as cache_module
from npu_trainer_kernels.rollouts.masked import MaskedDecoding, masks_of_rows
from npu_trainer_kernels.rollouts.on_device import OnDevice
from tests.families.tiny import tiny_config, tiny_model

from .common import LENGTHS, alone, greedy, padded, prompts, sampled

# What its own code does.
KINDS = {
    "bloom": {},  # biases by the position of a key, which the mask gives
    "mpt": {},  # biases by the distance from the last place
    "falcon": {},  # an attention of its own, whose heads a list of one index selects
    "falcon alibi": {"alibi": True},
    "llama4_text": {},  # attends in chunks of eight tokens
}
DIFFERS = "its logits differ from those of its own forward"


def plain_model(kind):
    family = kind.split()[0]
    made = tiny_model("causal", family).eval()
    if not KINDS[kind]:
        return made
    config = copy.deepcopy(made.config)
    vars(config).update(KINDS[kind])
    other = type(made)(config).eval()
    other.load_state_dict(made.state_dict())
    return other


def served(kind, **options):
    model = plain_model(kind)
    rollouts = serve_rollouts(apply_npu_kernels(model, backend="torch"), **options)
    assert rollouts is not None
    return model, rollouts


@pytest.mark.parametrize("most_rows", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_each_prompt_alone(kind, most_rows):
    model, rollouts = served(kind, most_rows=most_rows)
    plain = plain_model(kind)
    first = alone(plain, prompts(), greedy(16))
    config = greedy(16, eos_token_id=[row[3 + i] for i, row in enumerate(first[:4])])
    expected = alone(plain, prompts(), config)
    assert len({len(row) for row in expected}) > 1
    for _ in range(2):
        assert completions(model, prompts(), config)[0] == expected
    assert rollouts.engine.rollouts == 2
    assert rollouts.engine.masked


def test_drawn_tokens_are_those_of_generate_with_the_same_seed():
    model, rollouts = served("bloom")
    plain, given = plain_model("bloom"), padded(prompts((9, 9, 9)))
    torch.manual_seed(3)
    found = model.generate(**given, generation_config=sampled(10))
    torch.manual_seed(3)
    assert torch.equal(found, plain.generate(**given, generation_config=sampled(10)))
    assert rollouts.engine.rollouts == 1


def test_the_step_is_kept_and_reads_the_weights_as_they_are():
    model, rollouts = served("falcon", keep=True)
    plain, steps = plain_model("falcon"), []
    for seed in range(3):
        given = prompts(seed=seed)
        assert completions(model, given, greedy(10))[0] == alone(plain, given, greedy(10))
        steps.append(rollouts.engine.step)
        with torch.no_grad():
            for each in (model, plain):
                for p in each.parameters():
                    p.mul_(0.9)
    assert steps[0] is steps[1] is steps[2] is not None


def test_under_autocast():
    model, rollouts = served("bloom")
    with torch.autocast("cpu", torch.bfloat16):
        found = completions(model, prompts(), greedy(6))[0]
    assert [len(row) for row in found] == [6] * len(LENGTHS)
    assert rollouts.engine.rollouts == 1


def test_a_packed_row_comes_first():
    """Llama's attention takes a `PackedMask`, so its own code does not attend."""
    model = tiny_model("causal", "llama").eval()
    rollouts = serve_rollouts(apply_npu_kernels(model, backend="torch"))
    completions(model, prompts(), greedy(4))
    assert not rollouts.engine.masked


def test_each_number_of_places_is_compared_first_and_last_tokens(monkeypatch):
    monkeypatch.setattr(cache_module, "_ROOM", 16)
    compared, own = [], turns.differs
    monkeypatch.setattr(turns, "differs", lambda *args: (compared.append(args[-1]), own(*args))[1])
    model, _ = served("bloom")

    def looks(tokens):
        del compared[:]
        completions(model, prompts(), greedy(tokens))
        return list(compared)

    assert [looks(8), looks(8), looks(40), looks(40)] == [[False, True], [], [False, True], []]


# ---------------------------------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------------------------------


def decoding_of(*written, places=16):
    made = MaskedDecoding(None, "sdpa", places, None)
    made.written = torch.tensor(written, dtype=torch.int32)
    return made


class Cache(DynamicCache):
    def get_mask_sizes(self, *args):
        return 16, 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_of_rows(attention):
    config = tiny_config("causal", "llama4_text")
    config._attn_implementation = attention
    decoding = decoding_of(0, 7, 8, 15)
    given = {"config": config, "inputs_embeds": torch.zeros(4, 1, 8), "past_key_values": Cache()}
    with masks_of_rows(decoding):
        causal = create_causal_mask(attention_mask=decoding.mask(), **given)
        chunks = create_chunked_causal_mask(attention_mask=decoding.mask(), **given)
    starts = [[0, 0, 0, 0], [0, 0, 8, 8]]
    for mask, begins in zip((causal, chunks), starts, strict=True):
        seen = mask if attention == "sdpa" else mask == 0
        expected = [[begin <= place <= n for place in range(16)]
                    for begin, n in zip(begins, (0, 7, 8, 15), strict=True)]  # fmt: skip
        assert seen[:, 0, 0].tolist() == expected


def test_masks_of_other_threads_are_as_always():
    config = tiny_config("causal", "llama4_text")
    config._attn_implementation = "eager"
    given = {"config": config, "inputs_embeds": torch.zeros(1, 4, 8), "attention_mask": None, "past_key_values": None}
    before, found = create_causal_mask(**given), []
    own = dict(ALL_MASK_ATTENTION_FUNCTIONS)
    with masks_of_rows(decoding_of(3)):
        other = threading.Thread(target=lambda: found.append(create_causal_mask(**given)))
        other.start()
        other.join()
    assert torch.equal(found[0], before)
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == own


def test_attention_without_a_tensor_for_a_mask_is_left_to_generate():
    function = "flash_attention_2"
    with masks_of_rows(decoding_of(3)), pytest.raises(
        Unserved, match=r"its own attention \(flash_attention_2\) takes no mask of each row"
    ):  # fmt: skip
        ALL_MASK_ATTENTION_FUNCTIONS[function](batch_size=1, q_length=1, kv_length=16)


# ---------------------------------------------------------------------------------------------------------------------
# Constants on the device
# ---------------------------------------------------------------------------------------------------------------------


def test_code_that_needs_nothing_changed_is_known():
    """A step like it is then captured without the mode; other code says that it was changed."""
    t = torch.arange(6).view(2, 3)
    with OnDevice(None) as mode:
        assert (t[0] + torch.full((3,), 2)[[0, 1, 2]] + torch.tensor([1, 2, 3])).sum() == 15
    assert not mode.changed
    for change in (lambda: torch.tensor(1.0), lambda: t[[0]], lambda: t[:, [1]], lambda: Normal(0, 1)):
        with OnDevice(None) as mode:
            change()
        assert mode.changed


@pytest.mark.parametrize("number", [True, 3, -0.5])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}], ids=str)
def test_scalars_are_filled(number, options):
    expected = torch.tensor(number, **options)
    with OnDevice(None):
        found = torch.tensor(number, **options)
        given = torch.tensor([1, 2])
    assert torch.equal(found, expected)
    assert found.dtype is expected.dtype
    assert given.tolist() == [1, 2]


@pytest.mark.parametrize(
    "index", [[1], [-1], (slice(None), [-2]), (..., [-1], slice(1)), [0, 1], ([0], [1]), 1, (0, [1])], ids=str
)
def test_lists_of_one_index(index):
    t = torch.arange(24).view(3, 2, 4)
    with OnDevice(None):
        found = t[index]
    assert torch.equal(found, t[index])


def test_distributions_are_not_validated():
    before = Distribution._validate_args
    with OnDevice(None):
        assert not Normal(0, 1)._validate_args
    assert Distribution._validate_args is before


def test_code_that_selects_among_its_keys():
    with OnDevice(16):
        torch.zeros(2, 16).topk(2)  # experts
        torch.zeros(2, 4, 8).topk(2)
        for select in (torch.topk, torch.Tensor.topk):
            with pytest.raises(Unserved, match="it selects among its keys"):
                select(torch.zeros(2, 4, 1, 16), 3)


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults: the first rollout's comparisons see them
# ---------------------------------------------------------------------------------------------------------------------


def _reason_of(model, given=None):
    with pytest.raises(ValueError, match="cannot be generated by captured steps") as caught:
        completions(model, given or prompts(), greedy(8))
    return str(caught.value)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_chunk_that_begins_elsewhere_is_seen(off, monkeypatch):
    own = decode.masks_of_rows

    def shifted(decoding):
        other = copy.copy(decoding)
        other.written = decoding.written + off
        return own(other)

    monkeypatch.setattr(decode, "masks_of_rows", shifted)
    # The token after a prompt of 7 is the last one of a chunk, and that after one of 8 the first one.
    assert DIFFERS in _reason_of(served("llama4_text")[0], prompts((7, 8, 8)))


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_a_token_that_does_not_see_itself_is_seen(kind, monkeypatch):
    monkeypatch.setattr(
        MaskedDecoding, "mask", lambda self: (torch.arange(self.longest) < self.written[:, None]).long()
    )
    assert DIFFERS in _reason_of(served(kind)[0])


def test_a_bias_by_another_position_is_seen(monkeypatch):
    """The first place counts twice, so later keys are one position further away from it."""
    own = MaskedDecoding.mask
    monkeypatch.setattr(MaskedDecoding, "mask", lambda self: own(self) * (1 + (torch.arange(self.longest) == 0).long()))
    assert DIFFERS in _reason_of(served("bloom")[0])


def test_places_of_a_row_before_are_seen(monkeypatch):
    """A mask that is not cleared shows a row the keys of the one that had its places, beyond its own."""
    own = decode.Step.__init__

    def step(self, model, cache, rows, sampling, decoding, *args, **kwargs):
        decoding.cache = cache
        own(self, model, cache, rows, sampling, decoding, *args, **kwargs)

    monkeypatch.setattr(decode.Step, "__init__", step)
    monkeypatch.setattr(
        MaskedDecoding, "mask", lambda self: (self.cache.keys[0].abs().amax((1, 3)) > 0).long().index_fill(
            1, torch.zeros(1, dtype=torch.long, device=self._written.device), 1
        ) | (torch.arange(self.longest) == self._written[:, None]).long()
    )  # fmt: skip
    monkeypatch.setattr(
        MaskedDecoding, "written",
        property(lambda self: torch.full_like(self._written, self.longest - 1),
                 lambda self, value: vars(self).__setitem__("_written", value)),
        raising=False,
    )  # fmt: skip
    given = prompts((15, 14, 3, 4))[:3]
    completions(served("falcon", most_rows=3)[0], given, greedy(8))  # nobody had these places before
    assert DIFFERS in _reason_of(served("falcon", most_rows=2)[0], given)
