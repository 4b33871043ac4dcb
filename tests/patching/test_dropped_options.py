"""transformers' own attention on an NPU drops windows, soft caps and sinks: a warning says so before training."""

import functools
import warnings
from typing import Any

import pytest
from transformers.integrations import npu_flash_attention

from npu_trainer_kernels import apply_npu_kernels, device
from tests.models import small_model

OPS = ["varlen_attention"]
STARTS = 'with attn_implementation="flash_attention_2" transformers drops the'


def warned(
    family: str, named: str = "flash_attention_2", chip: str | None = "Ascend910B4", **options: Any
) -> list[str]:
    """The warnings of two `refresh` of a model with this attention; on the CPU, or on an NPU that it stands in for."""
    model = small_model(family, **options)
    model.config._attn_implementation_internal = named
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if chip is None:
            kernels = apply_npu_kernels(model, ops=OPS, backend="torch")
        else:
            with device.stand_in(device.ASCEND_CHIPS[chip]):
                kernels = apply_npu_kernels(model, ops=OPS, backend="torch")
                kernels.refresh()
    text = kernels.report().text()
    found = [str(each.message) for each in told if STARTS in str(each.message)]
    for each in found:
        assert each.removeprefix("NPU kernels: ") in text
    assert bool(found) == (STARTS in text)
    assert "varlen_attention  torch" in text
    return found


@pytest.mark.parametrize(
    ("family", "options", "dropped", "choose"),
    [
        ("mistral", {"sliding_window": 9}, "sliding windows of MistralModel", "sdpa"),
        ("gpt-oss", {}, "sliding windows and attention sinks of GptOssModel", "eager"),
        ("gemma2", {"sliding_window": 9}, "sliding windows and soft caps of Gemma2Model", "eager"),
    ],
)
def test_what_is_dropped_is_named_once(family: str, options: dict[str, Any], dropped: str, choose: str) -> None:
    (text,) = warned(family, **options)
    assert text.startswith(f"NPU kernels: {STARTS} {dropped} on this device")
    assert "without a word: the model's own results are wrong" in text
    assert text.endswith(f'Choose attn_implementation="{choose}"')


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gpt-oss", {"chip": None}),
        ("gpt-oss", {"named": "eager"}),
        ("mistral", {"sliding_window": None}),
    ],
    ids=str,
)
def test_no_word_where_nothing_is_dropped(family: str, options: dict[str, Any]) -> None:
    assert warned(family, **options) == []


def test_a_transformers_that_passes_windows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one may: its function then has a parameter of that name, which is what transformers goes by."""
    for name in ("npu_flash_attn_func", "npu_flash_attn_varlen_func"):
        own = getattr(npu_flash_attention, name)

        @functools.wraps(own)
        def later(q: Any, window_size: Any = None, own: Any = own, **kwargs: Any) -> Any:
            raise AssertionError("not called")

        del later.__wrapped__
        monkeypatch.setattr(npu_flash_attention, name, later)
    assert warned("mistral", sliding_window=9) == []
    (text,) = warned("gpt-oss")
    assert "drops the attention sinks of GptOssModel" in text
