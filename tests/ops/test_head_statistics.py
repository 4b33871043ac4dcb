"""The head's statistics where lanes, steps and tail of the kernel meet; first maxima; logits that are not finite."""

import math

import pytest
import torch

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.ops.head.reference import logits_statistics_reference
from npu_trainer_kernels.ops.head.statistics import row_statistics
from tests.closeness import assert_op_close
from tests.pairs import pairs

EVERYTHING = {"entropy": True, "mean": True, "log_sum_sq": True, "argmax": True}
# Of 64 lanes, two rows of which are a step (the interpreter's tile): fewer than the lanes, all of them, steps alone,
# and steps with a tail of one row and of two.
VOCABULARIES = [1, 37, 64, 256, 300, 373]


def statistics(logits, backend, **options):
    ids = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return row_statistics(logits, ids, None, HeadOptions(**options), backend)[0]


OPTIONS = [{}, {"softcap": 3.0, "logit_scale": -0.5}, {"temperature": 0.7}]


@pytest.mark.parametrize(
    ("vocabulary", "options", "weighted"), pairs(VOCABULARIES[1:], OPTIONS, [False, True]), ids=str
)
def test_every_column_counts_once(device, backend, vocabulary, weighted, options):
    options = HeadOptions(**EVERYTHING, **options)
    # None about 0: a mean of these would be a small difference of large sums.
    logits = 1 + 3 * torch.rand(40, vocabulary, device=device)
    weights = torch.rand(vocabulary, device=device) if weighted else None
    ids = torch.randint(0, vocabulary, (40,), device=device)
    assert_op_close(
        lambda logits: row_statistics(logits, ids, weights, options, backend)[0],
        lambda logits: logits_statistics_reference(logits, ids, options, weights),
        [logits],
    )


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_first_of_equal_maxima(device, backend, vocabulary):
    logits = torch.randint(-2, 2, (40, vocabulary), device=device).float()
    logits[:3] = torch.tensor([[0.0], [-5.0], [1e-20]], device=device)
    logits[4:8, -1] = 7.0
    assert torch.equal(statistics(logits, backend, argmax=True).argmax, logits.argmax(-1))


def test_the_first_of_maxima_that_differ_in_the_last_bit(device, backend):
    one = torch.tensor(1e-3, device=device)
    above = one.nextafter(2 * one)
    for column in (0, 64, 130, 255, 299):
        logits = one.repeat(1, 300)
        logits[0, column] = above
        assert statistics(logits, backend, argmax=True).argmax == column


# A step's first row and its second, a later step, both rows of the tail.
@pytest.mark.parametrize("column", [0, 70, 200, 256, 372])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_nan_or_infinite_spoils_its_row_alone(device, backend, column, value):
    logits = torch.randn(3, 373, device=device)
    clean = statistics(logits, backend, **EVERYTHING)
    logits[1, column] = value
    dirty = statistics(logits, backend, **EVERYTHING)
    for name, numbers in dirty._asdict().items():
        if numbers is None:  # a teacher's
            continue
        assert torch.equal(numbers[[0, 2]], getattr(clean, name)[[0, 2]]), name
        if name != "argmax":
            assert not numbers[1].isfinite(), name
    assert dirty.log_prob[1].isnan()
    assert dirty.entropy[1].isnan()
    # Of such a row torch and the kernel name different columns, but columns.
    assert 0 <= dirty.argmax[1] < 373


@pytest.mark.parametrize("kept", [slice(0, 3), slice(70, 71), slice(130, 373), slice(370, 373)])
def test_logits_of_minus_infinity_count_nothing(device, backend, kept):
    logits = torch.full((2, 373), -math.inf, device=device)
    logits[:, kept] = torch.randn(2, 373, device=device)[:, kept]
    ids = torch.full((2,), kept.start, device=device)
    options = HeadOptions(log_sum_sq=True, argmax=True)

    def defined(found):
        return found.log_prob, found.lse, found.log_sum_sq, found.argmax

    assert_op_close(
        lambda logits: defined(row_statistics(logits, ids, None, options, backend)[0]),
        lambda logits: defined(logits_statistics_reference(logits, ids, options)),
        [logits],
    )


def test_a_row_of_minus_infinity_has_no_probabilities(device, backend):
    logits = torch.full((2, 373), -math.inf, device=device)
    assert statistics(logits, backend).log_prob.isnan().all()


# A tail that is left out, and, in the interpreter, one whose second row is.
@pytest.mark.parametrize("vocabulary", [300, 373])
def test_a_tail_that_is_too_short_is_seen(device, monkeypatch, vocabulary):
    whole = tiling.StatisticsTile.tail
    monkeypatch.setattr(tiling.StatisticsTile, "tail", lambda *args: whole(*args) // 2)
    with pytest.raises(AssertionError):
        test_every_column_counts_once(device, "triton", vocabulary, False, {})
