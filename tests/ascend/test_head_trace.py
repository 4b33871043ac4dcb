"""What the head's kernels cost the vector unit, followed by trace: instructions per logit, and waits per row."""

import pytest

from npu_trainer_kernels.ascend.sweep import Sweep, sweep

VOCABULARY = 151936
STATISTICS, GRADIENT = "_row_statistics_kernel", "_row_gradient_kernel"
# What no form of the formula goes below: to fp32, maximum, difference, exponential and sum are five instructions. A
# temperature takes one, the mean's sum one, entropy's product and sum two, the squares' two, the argmax three, and a
# softcap five. The gradient: to fp32, difference, exponential, factor and back; with a softcap seven more, since its
# slope is made of what the softcap is made of.
LEAST = {
    ("linear_cross_entropy", STATISTICS): 5,
    ("linear_cross_entropy, label smoothing, z-loss", STATISTICS): 6,
    ("linear_cross_entropy, accuracy", STATISTICS): 8,
    ("linear_cross_entropy, softcap", STATISTICS): 10,
    ("linear_logprob, entropy", STATISTICS): 8,
    ("linear_logprob, everything", STATISTICS): 18,
    ("linear_cross_entropy", GRADIENT): 5,
    ("linear_cross_entropy, softcap", GRADIENT): 12,
}


@pytest.mark.parametrize(("case", "kernel"), LEAST, ids=str)
def test_instructions_and_waits(kept_cache, case, kernel):
    tile = "statistics_tile.fold" if kernel == STATISTICS else "gradient_tile.block"
    (found,) = sweep(Sweep(case, kernel, (VOCABULARY,), (), tile))
    assert found.passes
    assert found.trial.waits_per_row <= 8
    assert found.instructions <= 1.1 * LEAST[case, kernel]
