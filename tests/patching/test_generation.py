"""A forward of one token of each row, without gradients, is the model's own; every other one is served."""

import copy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig

from npu_trainer_kernels import apply_npu_kernels, patching
from npu_trainer_kernels.patching import PATCHES
from tests.models import batch, small_model

SERVED = {
    "llama": {"rms_norm", "add_rms_norm", "rope", "swiglu", "embedding"},
    "qwen3-moe": {"rms_norm", "add_rms_norm", "rope", "moe_experts", "embedding"},
    "mamba2": {"rms_norm", "gated_rms_norm", "embedding"},
}

PATCHING = Path(patching.__file__).parent


def ran(kernels) -> set[str]:
    """Ops that have served a call since the kernels were applied."""
    return {op for op, calls in kernels.report().ran.items() if calls}


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("embedded", [False, True])
def test_with_one_token_of_each_row_every_op_stands_aside(family, embedded):
    model, ids = small_model(family), batch()["input_ids"]
    given = {"inputs_embeds": model.get_input_embeddings()(ids).detach()} if embedded else {"input_ids": ids}
    served = SERVED[family] - {"embedding"} if embedded else SERVED[family]

    def ops_of(columns: int, gradients: bool) -> set[str]:
        with apply_npu_kernels(model, ops=PATCHES, backend="triton") as kernels, torch.set_grad_enabled(gradients):
            model(**{name: value[:, :columns].contiguous() for name, value in given.items()}, use_cache=not gradients)
            assert not kernels.report().declined
            return ran(kernels)

    assert ops_of(1, gradients=False) == set()
    assert ops_of(2, gradients=False) == served  # it scores
    assert ops_of(1, gradients=True) == served  # it trains


def _calls_of_a_token(model) -> Counter:
    """The package's calls of Python below a model's own forward, by file and function."""
    ids, calls = batch()["input_ids"][:, :1], Counter()

    def called(frame, event, _):
        where = Path(frame.f_code.co_filename)
        if event == "call" and where.is_relative_to(PATCHING):
            calls[where.name, frame.f_code.co_name] += 1

    model(input_ids=ids)
    sys.setprofile(called)
    try:
        model(input_ids=ids)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("family", SERVED)
def test_patched_modules_are_not_called_for_a_token(family):
    """A model has hundreds of patched modules, and the host, which limits generation, runs these calls of Python."""
    model = small_model(family)
    with apply_npu_kernels(model, ops=PATCHES, backend="triton"), torch.no_grad():
        calls = _calls_of_a_token(model)
    assert not [name for name in calls if name[0] == "patch.py"], calls
    assert sum(calls.values()) < 40, calls


@pytest.mark.parametrize("family", SERVED)
def test_a_patched_module_asks_one_question_for_a_token(family, monkeypatch):
    """Where modules cannot stand aside, since another forward is under way."""
    model = small_model(family)
    with apply_npu_kernels(model, ops=PATCHES, backend="triton") as kernels, torch.no_grad():
        monkeypatch.setattr(kernels._aside, "_running", 1)
        calls = _calls_of_a_token(model)
    forwards = calls["patch.py", "forward"]
    assert forwards > 2 * len(SERVED[family])
    assert {name for file, name in calls if file == "patch.py"} == {"forward"}
    assert calls["call.py", "generates"] == forwards


def test_after_such_a_forward_ops_serve_again():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES, backend="triton") as kernels, torch.no_grad():
        model(input_ids=batch()["input_ids"][:, :1])
        model.model.norm(torch.randn(2, 1, 48))
        assert kernels.report().ran["rms_norm"] == 1


def test_a_vendors_operators_stay():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES, backend="triton") as kernels, torch.no_grad():
        for site in kernels.report().sites:
            site.served = "vendor"
        model(input_ids=batch()["input_ids"][:, :1])
        assert ran(kernels) == SERVED["llama"]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3"])
def test_from_the_same_cache_the_same_bits_are_generated(family):
    model, ids = small_model(family, use_cache=True).bfloat16().eval(), batch()["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values

    def generated():
        return model.generate(
            ids, past_key_values=copy.deepcopy(cache), max_new_tokens=4, min_new_tokens=4, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    plain = generated()
    with apply_npu_kernels(model, ops=PATCHES, backend="triton") as kernels:
        found = generated()
        assert ran(kernels) == set()
    assert torch.equal(found.sequences, plain.sequences)
    assert all(map(torch.equal, found.logits, plain.logits))
    assert len(found.logits) == 4


def compiled() -> dict:
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True  # else transformers compiles for accelerators alone
    return {"cache_implementation": "static", "compile_config": config}


WAYS = {
    "greedy": dict,
    "beams": lambda: {"num_beams": 2},
    "static": lambda: {"cache_implementation": "static", "disable_compile": True},
    "compiled": compiled,
    "assisted": lambda: {"assistant_model": small_model("llama").eval()},
}


@pytest.mark.full("compiled")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate_finds_the_models_ids(way):
    def generated(model):
        return model.eval().generate(
            torch.arange(5, 13)[None], max_new_tokens=12, min_new_tokens=12, do_sample=False, **WAYS[way]()
        )

    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES, backend="triton") as kernels:
        found = generated(model)
        calls = kernels.report().ran["swiglu"] // len(model.model.layers)
    # The prompt is served; an assistant's tokens are verified several at once, until fewer than two are left.
    assert calls > 1 if way == "assisted" else calls == 1
    assert torch.equal(found, generated(small_model("llama")))


def test_a_layers_forward_is_the_one_that_it_had(monkeypatch):
    model = small_model("llama")
    with apply_npu_kernels(model, ops=PATCHES, backend="triton"), torch.no_grad():
        monkeypatch.setattr(type(model.model.layers[0]), "_npu_kernels_add_rms_norm", None)
        model(input_ids=batch()["input_ids"][:, :1])
