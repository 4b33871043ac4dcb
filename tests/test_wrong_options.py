"""Wrong options of what is called in Python: the error names the option, its value and what is allowed."""

from typing import Any

import pytest

from npu_trainer_kernels import NpuKernelsArguments, NpuKernelsCallback, apply_npu_kernels
from tests.models import small_model

# Of the options that all of them have: (options, the error, what it says).
SHARED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ops": []}, ValueError, "ops must be a"),
    ({"ops": ["rmsnorm"]}, ValueError, "got ['rmsnorm']; did you mean 'rms_norm'?"),
    ({"backend": "tritn"}, ValueError, "backend must be one of triton, torch, vendor"),
    ({"backend": "norm=torch"}, ValueError, "unknown op 'norm'"),
    ({"strict": "no"}, ValueError, "strict must be true or false; got 'no'"),
    ({"tiled_mlp": -1}, ValueError, "tiled_mlp must be a number of tokens, or 0 for all at once; got -1"),
    ({"tiled_mlp": 8, "ops": ["rope"]}, ValueError, "tiled_mlp=8 needs swiglu among ops; got ['rope']"),
    ({"capture": "maybe"}, ValueError, "capture must be one of auto, on, off; got 'maybe'"),
]
OF_CALLBACK: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rollouts": "no"}, ValueError, "rollouts must be one of auto, on, off; got 'no'"),
    ({"warm_up": "yes"}, ValueError, "warm_up must be true or false; got 'yes'"),
    ({"balance": 1}, ValueError, "balance must be true or false; got 1"),
    ({"audit": 0}, ValueError, "audit must be 'first', 'off' or a positive number of steps; got 0"),
    ({"audit": "never"}, ValueError, "audit must be 'first', 'off' or a positive number of steps; got 'never'"),
    ({"report": "ful"}, ValueError, "report must be one of short, full; got 'ful'; did you mean 'full'?"),
]


def _arguments(**options: Any) -> NpuKernelsArguments:
    return NpuKernelsArguments(
        use_npu_kernels=True, **{f"npu_kernels_{name}": value for name, value in options.items()}
    )


def _model(**options: Any) -> Any:
    return apply_npu_kernels(small_model("llama"), **options)


CASES = [
    *(("callback", NpuKernelsCallback, *case) for case in (*SHARED, *OF_CALLBACK)),
    *(("arguments", _arguments, *case) for case in (*SHARED, *OF_CALLBACK)),
    *(("apply", _model, *case) for case in SHARED),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]} {' '.join(f'{name}={value!r}' for name, value in case[2].items())}" for case in CASES],
)
def test_a_wrong_option_is_named(make, options, error, said):
    with pytest.raises(error) as raised:
        make(**options)
    # The fields of a command line have a longer name.
    assert said in str(raised.value).replace("npu_kernels_", "")


@pytest.mark.parametrize("option", ["ops", "audit", "report", "capture"])
def test_options_without_the_flag_are_refused(option):
    value: Any = {"ops": ["rope"], "audit": "off", "report": "full", "capture": "on"}[option]
    with pytest.raises(ValueError, match=f"npu_kernels_{option} does nothing without --use_npu_kernels"):
        NpuKernelsArguments(**{f"npu_kernels_{option}": value})


def test_no_model_at_all():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got str"):
        apply_npu_kernels("Qwen/Qwen3-0.6B")


@pytest.mark.trl_head
def test_grpo_trainer_wants_the_arguments_of_the_flag():
    from npu_trainer_kernels import GRPOTrainer

    with pytest.raises(TypeError, match="npu_kernels must be an NpuKernelsArguments, or None; got dict"):
        GRPOTrainer(npu_kernels={"ops": ["rope"]})
