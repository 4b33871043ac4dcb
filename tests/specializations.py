"""The specialisations that a model's training steps ask Triton for, as JSON; run where kernels are not interpreted.

    python -m tests.specializations FAMILY SHAPES

For the tiles of each kind of device, one list for each shape: what Triton's own binder makes of each launch, for a CUDA
target (what triton-ascend leaves unspecialised is decided by the same marks). Nothing is launched.
"""

import argparse
import functools
import json
import sys
from typing import Any

from transformers import PreTrainedModel
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, MockTensor, create_function_from_signature

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.device import ASCEND_CHIPS, GIB, KIB, DeviceSpec, use_spec
from npu_trainer_kernels.training import warmup
from tests.models import small_model

SPECS = {"cuda": DeviceSpec("cuda", "a GPU", 132, 256 * KIB, 80 * GIB), "npu": ASCEND_CHIPS["Ascend910B4"]}
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@functools.cache
def binder_of(kernel: Any) -> Any:
    assert isinstance(kernel, JITFunction)
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)


def key_of(launch: warmup.Launch) -> str:
    """What Triton looks a compiled kernel up by."""
    arguments = [MockTensor.wrap_dtype(a) for a in launch.args]
    _, specialization, options = binder_of(launch.kernel)(*arguments, **dict(launch.constexprs))
    return f"{launch.name} {specialization} {sorted(options.items())}"


def keys_of(model: PreTrainedModel, spec: DeviceSpec, shapes: list[tuple[int, int]]) -> list[list[str]]:
    keys = []
    with use_spec(spec), apply_npu_kernels(model, backend="ascend-lowering") as handle:
        for rows, length in shapes:
            found = warmup.record(handle, model, rows, length=length)
            assert found.problem is None, found.problem
            keys.append(sorted({key_of(launch) for launch in found.launches}))
    return keys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("shapes", help="rows x length, comma-separated, as 2x17,1x5")
    args = parser.parse_args()
    shapes = [(int(rows), int(length)) for rows, _, length in (s.partition("x") for s in args.shapes.split(","))]
    # Sizes as models have them: multiples of 16. Vocabularies are what they are.
    model = small_model(args.family, head_dim=16, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    print(json.dumps({kind: keys_of(model, spec, shapes) for kind, spec in SPECS.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
