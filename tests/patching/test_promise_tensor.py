"""Promised logits as a tensor, and how long what they hold is held."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.head.promise import OwedGradient, PromisedLogits
from tests.models import batch, small_model

from .promised import HEAD, IDS, formed

# ---------------------------------------------------------------------------------------------------------------------
# As a tensor
# ---------------------------------------------------------------------------------------------------------------------

ASKED = {
    "shape": lambda t: t.shape, "size": lambda t: t.size(-1), "dim": lambda t: t.dim(), "ndim": lambda t: t.ndim,
    "dtype": lambda t: t.dtype, "device": lambda t: t.device, "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf, "len": len, "numel": lambda t: t.numel(), "stride": lambda t: t.stride(),
    "is_floating_point": lambda t: (t.is_floating_point(), torch.is_floating_point(t)), "nbytes": lambda t: t.nbytes,
    "is_contiguous": lambda t: t.is_contiguous(), "is_cuda": lambda t: (t.is_cuda, t.is_meta, t.is_sparse),
    "layout": lambda t: t.layout, "tensor": lambda t: isinstance(t, torch.Tensor), "type": lambda t: t.type(),
    "grad_fn": lambda t: t.grad_fn is not None, "grad": lambda t: t.retains_grad, "view": lambda t: t._base is None,
    "same": lambda t: (t.float() is t, t.contiguous() is t), "hash": lambda t: {t: 1}[t],
    "no_grad": lambda t: torch.no_grad()(lambda: (t * 2).requires_grad)(), "detach": lambda t: t.detach().is_leaf,
    "slice": lambda t: (t[:, :-1].shape, t[:, :-1].stride(), t[:, :-1].is_contiguous()),
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_is_no_value_forms_nothing(family):
    model, plain = small_model(family), small_model(family)
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        promised, logits = model(**batch()).logits, plain(**batch()).logits
        assert type(promised) is PromisedLogits
        for name, ask in ASKED.items():
            assert ask(promised) == ask(logits), name
        assert formed(kernels) == []


@pytest.mark.parametrize("cls", [PromisedLogits, OwedGradient])
def test_no_name_of_a_tensor_means_something_else(cls):
    """`logits.real` is an attribute of every tensor."""
    special = {"__new__", "__module__", "__doc__", "__dict__", "__annotations__", "__torch_function__"}
    assert set(vars(cls)) & set(dir(torch.Tensor)) <= special | {"__torch_dispatch__", "__static_attributes__"}


def test_copies_and_files_hold_ordinary_tensors():
    model, expected = small_model("llama"), small_model("llama")(input_ids=IDS).logits
    with apply_npu_kernels(model, ops=HEAD):
        logits = model(input_ids=IDS).logits
        for copied in (
            copy.deepcopy(model(input_ids=IDS).logits.detach()),
            pickle.loads(pickle.dumps(model(input_ids=IDS).logits)),
            _saved(model(input_ids=IDS).logits),
            torch.from_numpy(model(input_ids=IDS).logits.detach().numpy()),
            torch.tensor(model(input_ids=IDS).logits.tolist()),
        ):
            assert type(copied) is torch.Tensor
            assert torch.equal(copied, expected)
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(logits)
        assert str(logits) == str(expected).replace("UnsafeViewBackward0", "_RealBackward")


def _saved(logits):
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file)


def test_evaluation_and_calls_without_gradients_have_logits():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        with torch.no_grad():
            assert type(model(**batch()).logits) is torch.Tensor
        with torch.inference_mode():
            assert type(model(**batch()).logits) is torch.Tensor
        assert type(model.eval()(**batch()).logits) is torch.Tensor


# ---------------------------------------------------------------------------------------------------------------------
# How long what is held is held
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def uncollected():
    """Nothing may need the collector of garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_nothing_is_left_of_a_step():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        out = model(**batch())
        logits, call = weakref.ref(out.logits), weakref.ref(out.logits.place.call)
        out.loss.backward()
        loss = out.loss
        del out
        # A loss that is kept keeps no hidden states, once backward has run.
        assert (logits(), call()) == (None, None)
        assert loss.grad_fn is not None
        out = model(**batch())
        call = weakref.ref(out.logits.place.call)
        del out
        assert call() is None


@pytest.mark.usefixtures("uncollected")
def test_what_is_kept_of_logits_keeps_no_graph():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        out = model(**batch())
        graph = weakref.ref(out.logits.grad_fn), weakref.ref(out.loss.grad_fn)
        with torch.no_grad():
            kept = [out.logits.detach(), out.logits.float() * 2, out.logits[:, :-1].clone()]
        del out
        assert [node() for node in graph] == [None, None]
        assert torch.equal(kept[0] * 2, kept[1])


def test_logits_that_could_not_be_what_they_were_raise():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        used, unused = model(**batch()), model(**batch())
        (used.loss + unused.loss).backward()
        before = used.logits.sum()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert torch.equal(used.logits.sum(), before)
        with pytest.raises(RuntimeError, match="weight or its input has been written to"):
            unused.logits.sum()
