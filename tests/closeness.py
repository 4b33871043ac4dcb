"""The accuracy rule of the package, by the name that the tests know."""

from npu_trainer_kernels.closeness import (
    FACTOR,
    ULPS_EACH,
    ULPS_RMS,
    Tensors,
    assert_as_close,
    assert_op_close,
    rounded,
    rounded_if_needed,
    run,
)

__all__ = [
    "FACTOR",
    "ULPS_EACH",
    "ULPS_RMS",
    "Tensors",
    "assert_as_close",
    "assert_op_close",
    "rounded",
    "rounded_if_needed",
    "run",
]
