"""Patched modules have their own classes for the length of a forward that generates, and never beyond it."""

import copy
import threading

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.call import current_call
from npu_trainer_kernels.patching.classes import is_patched_class
from tests.models import batch, small_model

TOKEN = torch.tensor([[5], [7]])


def patched(model):
    """Which modules inside of a model have a class of the package."""
    return [is_patched_class(type(module)) for module in list(model.modules())[1:]]


def seen_by(model, **inputs):
    """What `patched` says while the last layer of a forward runs."""
    found = []
    handle = model.model.norm.register_forward_hook(lambda *args: found.append(patched(model)))
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    (one,) = found
    return one


@pytest.fixture
def model():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=PATCHES, backend="torch")
    yield model
    kernels.restore()


def test_only_while_a_token_of_each_row_is_made(model):
    before = patched(model)
    assert sum(before) > 10
    assert not any(seen_by(model, input_ids=TOKEN))
    assert patched(model) == before
    assert seen_by(model, input_ids=batch()["input_ids"]) == before
    assert not any(seen_by(model, input_ids=TOKEN))


def test_after_an_error(model):
    before = patched(model)
    handle = model.model.norm.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(input_ids=TOKEN)
    handle.remove()
    assert patched(model) == before
    assert not any(seen_by(model, input_ids=TOKEN))


def test_another_forward_has_them_back(model):
    """It may need them: it begins on another thread while a token is made, or inside of the forward that makes it."""
    before, ids, found = patched(model), batch()["input_ids"], []
    expected = small_model("llama")(input_ids=ids).logits

    def other(*args):
        handle.remove()
        thread = threading.Thread(target=lambda: found.extend((seen_by(model, input_ids=ids), model(input_ids=ids))))
        thread.start()
        thread.join()

    handle = model.model.layers[0].register_forward_hook(other)
    with torch.no_grad():
        model(input_ids=TOKEN)
    assert found[0] == before
    torch.testing.assert_close(found[1].logits, expected)
    assert patched(model) == before
    assert not any(seen_by(model, input_ids=TOKEN))


def test_not_while_another_forward_is_under_way(model):
    before, found = patched(model), []

    def other(*args):
        handle.remove()
        thread = threading.Thread(target=lambda: found.append(seen_by(model, input_ids=TOKEN)))
        thread.start()
        thread.join()

    handle = model.model.layers[0].register_forward_hook(other)
    model(**batch())
    assert found == [before]
    assert not any(seen_by(model, input_ids=TOKEN))


def test_a_class_that_a_wrapper_has_derived_stays(model):
    norm = model.model.norm
    assert not any(seen_by(model, input_ids=TOKEN))
    norm.__class__ = wrapper = type("Wrapper", (type(norm),), {})
    seen_by(model, input_ids=TOKEN)
    assert type(norm) is wrapper


def test_modules_that_are_patched_later(model):
    assert not any(seen_by(model, input_ids=TOKEN))
    model(**batch()).loss.backward()  # its attention gets a class for packed rows
    before = patched(model)
    assert not any(seen_by(model, input_ids=TOKEN))
    assert patched(model) == before


def test_patches_that_are_taken_out_meanwhile():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=PATCHES, backend="torch")
    handle = model.model.norm.register_forward_hook(lambda *args: kernels.restore())
    with torch.no_grad():
        model(input_ids=TOKEN)
    handle.remove()
    assert not any(patched(model))
    assert current_call() is None


def test_a_copy(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in (model, other, model):
            each(input_ids=TOKEN)
    assert sum(patched(model)) > 10
