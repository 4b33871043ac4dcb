"""Which row goes where: equally many everywhere, and live tokens as even as pieces of them can be."""

import itertools
import random

import pytest

from npu_trainer_kernels.training.balance import Completion, arranged, imbalance, live


def rows_of(group: int, count: int, prompt: int, seed: int) -> list[Completion]:
    dice = random.Random(seed)
    return [Completion(i // group, prompt, min(4096, int(dice.lognormvariate(6, 1)))) for i in range(count)]


def loads_of(rows, way):
    return [[live(rows[i] for i in bin_) for bin_ in micro_batch] for micro_batch in way]


def waited(loads):
    return sum(map(max, loads))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_row_once_and_equally_many_everywhere(ranks):
    for slices, size, group, prompt in itertools.product((1, 3, 4), (1, 4, 6), (2, 4, 7, 8), (20, 3000)):
        rows = rows_of(group, ranks * slices * size, prompt, seed=ranks + slices)
        way = arranged(rows, ranks, slices)
        assert [len(micro_batch) for micro_batch in way] == [ranks] * slices
        assert {len(bin_) for micro_batch in way for bin_ in micro_batch} == {size}
        assert sorted(i for micro_batch in way for bin_ in micro_batch for i in bin_) == list(range(len(rows)))
        assert way == arranged(rows, ranks, slices)


@pytest.mark.parametrize("group", [2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_wait_little(group, seed):
    """Lengths as models make them, on four ranks, each with rows of its own prompts at first."""
    rows = rows_of(group, 4 * 4 * 8, 200, seed)
    before = [[[*range(32 * r + 8 * s, 32 * r + 8 * s + 8)] for r in range(4)] for s in range(4)]
    even = loads_of(rows, arranged(rows, 4, 4))
    shuffled = loads_of(rows, before)
    assert imbalance(even)[0] < 1.12 < imbalance(shuffled)[0]
    assert waited(even) < 0.95 * waited(shuffled)


def test_a_long_prompt_keeps_its_rows_together_and_a_short_one_does_not():
    """Two prompts with short completions and two with long ones, on four ranks."""

    def on_ranks(prompt):
        rows = [Completion(i // 4, prompt, 10 if i < 8 else 200) for i in range(16)]
        (bins,) = arranged(rows, 4, 1)
        return [[rows[i].prompt for i in bin_] for bin_ in bins], loads_of(rows, [bins])

    assert on_ranks(2000) == ([[2] * 4, [3] * 4, [0] * 4, [1] * 4], [[2800, 2800, 2040, 2040]])
    prompts, loads = on_ranks(1)
    assert [sum(prompt > 1 for prompt in bin_) for bin_ in prompts] == [2] * 4
    assert loads == [[424] * 4]


def test_without_lengths_prompts_keep_their_order():
    rows = [Completion(prompt, 0, 0) for prompt in (7, 3, 7, 5, 3, 3, 5, 7, 5)]
    assert arranged(rows, 1, 3) == [[[0, 2, 7]], [[1, 4, 5]], [[3, 6, 8]]]


def test_the_longest_go_to_one_micro_batch_and_take_turns():
    """Nobody waits where the ranks of a micro-batch are alike."""
    rows = [Completion(i, 0, tokens) for i, tokens in enumerate((1, 100, 2, 99, 50, 51))]
    assert loads_of(rows, arranged(rows, 2, 3)) == [[100, 99], [50, 51], [2, 1]]
    # The rows of a prompt are placed before longer ones, and wait for none of them.
    rows = [Completion(0, 1000, 10)] * 2 + [Completion(i, 0, 9000 if i < 3 else 300) for i in range(1, 7)]
    assert loads_of(rows, arranged(rows, 2, 2)) == [[9300, 9300], [600, 1020]]


def test_what_is_live():
    alike = [Completion(1, 100, 5), Completion(1, 100, 7)]
    assert live(alike) == 112
    # Less than 10% would be saved, which the body does not do.
    assert live([Completion(1, 4, 500), Completion(1, 4, 500)]) == 1008
    assert live([Completion(1, 100, 5), Completion(2, 100, 7)]) == 212


def test_imbalance_is_longest_over_mean():
    # Ranks wait for 30 and 10 of a mean of 15 tokens; 30 is the longest of all.
    assert imbalance([[10, 30], [10, 10]]) == (20 / 15, 2.0)
