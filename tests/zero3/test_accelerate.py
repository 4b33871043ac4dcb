"""The launch configurations for DeepSpeed in `examples/accelerate`, two gloo ranks on the CPU in place of NPUs."""

import pytest

from tests.distributed.test_accelerate import check


@pytest.mark.full("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_launch(tmp_path, stage):
    check(f"deepspeed_zero{stage}", "DeepSpeedEngine", tmp_path)
