"""A body that computes live tokens only, in every mode that people train in: exact, or left alone with the reason."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers
from accelerate.utils import compile_regions
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_trainer_kernels import NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.ops.attention.varlen_attention import varlen_attention
from npu_trainer_kernels.patching.body import batch as batch_module
from npu_trainer_kernels.patching.body import packed
from tests.models import small_model
from tests.patching.padded import (
    CHECKPOINTS,
    Batch,
    Step,
    compared,
    declined,
    llama,
    loss_of,
    of_transformers,
    padded,
    ran,
    same,
    shared,
    values,
    with_images,
)

# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpointing
# ---------------------------------------------------------------------------------------------------------------------


checkpoints = pytest.mark.parametrize("prepare", CHECKPOINTS.values(), ids=CHECKPOINTS)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of segments of each call of the op."""
    calls = []

    def counted(q: Any, k: Any, v: Any, segments: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(segments))
        return varlen_attention(q, k, v, segments, **kwargs)

    monkeypatch.setattr(packed, "varlen_attention", counted)
    return calls


@checkpoints
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_recomputed_layers_attend_by_segments(prepare, family, attended):
    apply_npu_kernels(small_model(family, sliding_window=6)).restore()  # its proof is made
    attended.clear()
    kernels = compared(lambda: small_model(family, sliding_window=6), prepare)
    assert ran(kernels) == 1
    assert shared(kernels)
    assert len(attended) == 2 * 2  # two layers, each of them twice
    assert len(set(attended)) == 1


def test_a_model_that_is_recomputed_as_a_whole():
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return checkpoint(lambda: model(**batch).loss, use_reentrant=False)

    assert ran(compared(llama(), step=step)) == 2


def test_between_forward_and_backward_the_configuration_is_as_it_was():
    model = of_transformers(False)(small_model("llama"))
    with apply_npu_kernels(model, ops=["varlen_attention"]):
        loss = loss_of(model, padded())
        assert model.config._attn_implementation == "sdpa"
        # Another batch in between, unpatched, as generation is.
        with torch.no_grad():
            model(input_ids=padded()["input_ids"])
        loss.backward()
        assert model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------------------------------------------------


def under_autocast(dtype: torch.dtype) -> Step:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return loss_of(model, batch)

    return step


@pytest.mark.parametrize("prepare", [same, *CHECKPOINTS.values()], ids=["kept", *CHECKPOINTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, prepare):
    assert ran(compared(llama(), prepare, under_autocast(dtype), truth_step=loss_of)) == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, attention):
    assert ran(compared(lambda: llama(attn_implementation=attention)().to(dtype))) == 1


@pytest.fixture
def no_accelerator():
    """accelerate keeps the precision of a process's first Accelerator, which may be that of another test's Trainer."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("no_accelerator")
def test_a_forward_that_accelerate_has_wrapped():
    def prepare(model: Any) -> Any:
        return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)

    assert ran(compared(llama(), prepare, truth_step=loss_of)) == 1
    model = prepare(small_model("llama"))
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        loss_of(model, padded()).backward()
    assert ran(kernels) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_dropout(attention):
    """Other numbers are drawn, from the same distribution: mean and spread of each hidden state over many draws."""
    draws = 400
    batch = padded()
    live = batch["attention_mask"].bool()
    model = small_model("llama", attention_dropout=0.3, attn_implementation=attention, num_hidden_layers=1).model

    def drawn() -> torch.Tensor:
        with torch.no_grad():
            given = (batch["input_ids"], batch["attention_mask"])
            return torch.stack([model(*given, use_cache=False).last_hidden_state[live] for _ in range(draws)])

    plain = drawn()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        ours = drawn()
        assert ran(kernels) == draws
        assert not shared(kernels)
    # The first token of a row has one key: it is dropped or not. Two standard normal numbers would differ like these.
    apart = (ours.mean(0) - plain.mean(0)) / ((ours.var(0) + plain.var(0)) / draws).sqrt()
    assert 0.8 < apart.square().mean().sqrt() < 1.2
    assert 0.95 < ours.var(0).mean() / plain.var(0).mean() < 1.05
    # A draw is its own for each row, also where rows begin alike.
    first, second = (ours[:, live[:row].sum()] for row in (0, 1))
    assert (first - second).abs().max() > 0.1


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile and hooks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def each_layer(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def each_layer_exchanged(model: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def each_forward(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    return model


def each_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")
    return model


def regions(model: Any) -> Any:
    return compile_regions(model, backend="eager")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("prepare", [each_layer, each_layer_exchanged, each_forward, each_attention, regions])
def test_compiled_layers_get_the_batch(prepare):
    """A graph that a packed row went through would be compiled anew for the next one."""
    kernels = compared(llama(), prepare)
    assert ran(kernels) == 0
    assert "compiled" in declined(kernels) or "its forward was set on the instance" in declined(kernels)


@pytest.mark.full("model")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("what", ["model", "body"])
def test_a_compiled_body_is_the_same_graph(what):
    frames = []
    for patched in (False, True):
        torch._dynamo.reset()
        counter, model = CompileCounter(), small_model("llama")
        if patched:
            kernels = apply_npu_kernels(model, ops=["varlen_attention"])
        (model if what == "model" else model.model).compile(backend=counter)
        for length in (21, 22, 23, 24):
            loss_of(model, padded(length=length)).backward()
        frames.append(counter.frame_count)
    assert frames[0] == frames[1]
    assert ran(kernels) == 0


def test_hooks_that_may_look_at_rows():
    def watched(model: Any) -> Any:
        model.model.layers[1].register_forward_hook(lambda module, args, output: None)
        return model

    kernels = compared(llama(), watched)
    assert ran(kernels) == 0
    assert "on its LlamaDecoderLayer may look at rows" in declined(kernels)


EVERYWHERE = (
    register_module_forward_hook, register_module_forward_pre_hook, register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)  # fmt: skip


@pytest.mark.parametrize("register", EVERYWHERE)
def test_hooks_of_all_modules_may_look_at_rows(register):
    seen: set[torch.Size] = set()

    def hook(module, *given):
        if isinstance(module, LlamaDecoderLayer):
            seen.update(t.shape for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.dim() == 3)

    model, batch = small_model("llama"), padded()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        loss_of(model, batch).backward()
        assert ran(kernels) == 1
        handle = register(hook)
        try:
            loss_of(model, batch).backward()
        finally:
            handle.remove()
        assert ran(kernels) == 1
        assert "on all modules may look at rows" in declined(kernels)
        assert {shape[:2] for shape in seen} == {batch["input_ids"].shape}
        loss_of(model, batch).backward()
        assert ran(kernels) == 2


def distilled(model: Any, batch: Batch, teacher: Any = None) -> torch.Tensor:
    """A loss over all positions, padding among them."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        wanted = 0 if teacher is None else teacher(**given).logits
    return (model(**given).logits - wanted).square().mean()


def test_a_loss_that_reads_padding_has_it_computed_in_every_model():
    batch, student, teacher = padded(), small_model("llama"), small_model("llama", seed=1)
    expected = values(copy.deepcopy(student), batch, lambda m, b: distilled(m, b, teacher))
    student_kernels, teacher_kernels = (apply_npu_kernels(m, ops=["varlen_attention"]) for m in (student, teacher))
    with student_kernels, teacher_kernels:
        with pytest.warns(RuntimeWarning, match="the loss reads hidden states of padding"):
            distilled(student, batch, teacher).backward()
        assert (ran(student_kernels), ran(teacher_kernels)) == (1, 1)
        student.zero_grad()
        found = values(student, batch, lambda m, b: distilled(m, b, teacher))
        assert (ran(student_kernels), ran(teacher_kernels)) == (1, 1)
        assert "the loss reads hidden states of padding" in declined(student_kernels)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # Of a model that is patched later nothing is known.
    later = small_model("llama")
    with apply_npu_kernels(later, ops=["varlen_attention"]) as kernels:
        loss_of(later, batch).backward()
        assert ran(kernels) == 1


def test_a_loss_that_begins_to_read_padding_is_found():
    model, batch = small_model("llama"), padded()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        for _ in range(2):
            loss_of(model, batch).backward()
        with pytest.warns(RuntimeWarning, match="the loss reads hidden states of padding"):
            [distilled(model, batch).backward() for _ in range(65)]
        assert 2 < ran(kernels) <= 64


def test_a_gradient_that_overflows_is_none_that_reads_padding(recwarn):
    model, batch = small_model("llama"), padded()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        live = batch["attention_mask"].unsqueeze(-1)
        (model.model(**{k: v for k, v in batch.items() if k != "labels"}).last_hidden_state * live * torch.inf).mean(
        ).backward()  # fmt: skip
        loss_of(model, batch).backward()
        assert ran(kernels) == 2
    assert not [w for w in recwarn if "padding" in str(w.message)]


# ---------------------------------------------------------------------------------------------------------------------
# Trainers, caches and waits
# ---------------------------------------------------------------------------------------------------------------------


def after_two_steps(model: Any, folder: Path, **options: Any) -> NpuKernelsCallback:
    """A Trainer has trained the model on padded rows, and has said nothing of caches."""
    batch = padded()
    del batch["use_cache"]
    rows = [{key: value[i].tolist() for key, value in batch.items()} for i in range(4)]
    callback = NpuKernelsCallback(ops=["varlen_attention"])
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
    return callback


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_in_a_trainer_no_cache_is_asked_for(name, tmp_path):
    model = small_model("llama") if name == "llama" else with_images("gemma3")
    callback = after_two_steps(model, tmp_path, bf16=True)
    assert callback.report().ran == {"varlen_attention": 2}
    assert not callback.report().declined
    assert callback.handle.settings.caches, "what was said of the Trainer's run outlived it"


def test_noise_that_depends_on_the_size_of_a_batch(tmp_path):
    callback = after_two_steps(small_model("llama"), tmp_path, neftune_noise_alpha=5.0)
    assert [d.reason for d in callback.report().declined] == [
        "a hook of transformers on its Embedding may look at rows"
    ]


def without_use_cache() -> Batch:
    batch = padded()
    del batch["use_cache"]
    return batch


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_by_hand_a_cache_that_the_configuration_asks_for_and_nobody_reads(family):
    kernels = compared(lambda: small_model(family, sliding_window=6, use_cache=True), batch=without_use_cache())
    assert ran(kernels) == 1
    assert not declined(kernels)


def caches_of(out: Any) -> list[torch.Tensor]:
    return [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [llama(use_cache=True), lambda: with_images("llava")], ids=["llama", "llava"])
def test_a_cache_that_is_read_is_what_the_model_returns(make, autocast):
    """With its class, its numbers and their gradients; read after backward."""
    batch, found, names = without_use_cache(), {}, {}
    for patched in (False, True):
        model = make()
        if patched:
            kernels = apply_npu_kernels(model, ops=["varlen_attention"])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**batch)
        assert isinstance(out.past_key_values, transformers.DynamicCache)
        out.loss.backward(retain_graph=True)  # the model's own keys are part of it
        model.zero_grad()
        assert len(out.past_key_values) == 2
        assert out.past_key_values.get_seq_length() == 21
        tensors = caches_of(out)
        assert type(out.past_key_values) is transformers.DynamicCache
        sum(t.float().square().sum() for t in tensors).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found[patched] = [*tensors, *grads]
        names[patched] = list(out)
    assert ran(kernels) == 1
    assert names[True] == names[False]
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))


READS: dict[str, Any] = {
    "len": len,
    "repr": repr,
    "an attribute": lambda cache: cache.layers,
    "a method": lambda cache: cache.get_seq_length(),
    "all layers": list,
    "a copy": copy.copy,
    "set": lambda cache: setattr(cache, "mine", 1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_cache_is_made_by_any_use(read):
    model = llama(use_cache=True)()
    with apply_npu_kernels(model, ops=["varlen_attention"]):
        cache = model(**without_use_cache()).past_key_values
        assert type(cache) is not transformers.DynamicCache
        read(cache)
        assert type(cache) is transformers.DynamicCache


@pytest.mark.parametrize("change", ["weights", "arguments", "mode"])
def test_a_cache_that_can_no_longer_be_computed(change):
    model, batch = llama(use_cache=True)(), without_use_cache()
    with apply_npu_kernels(model, ops=["varlen_attention"]):
        out = model(**batch)
        with torch.no_grad():
            if change == "weights":
                next(model.parameters()).mul_(2)
            elif change == "arguments":
                batch["input_ids"][0, 5] = 7
            else:
                model.eval()
        with pytest.raises(RuntimeError, match="have changed since"):
            len(out.past_key_values)


def test_a_cache_in_a_tuple():
    model, batch = llama(use_cache=True)(), without_use_cache()
    expected = model(**batch, return_dict=False)
    with apply_npu_kernels(model, ops=["varlen_attention"]):
        found = model(**batch, return_dict=False)
        assert len(found) == len(expected) == 3
        assert torch.equal(found[2].layers[1].keys, expected[2].layers[1].keys)
        cache = model.model(batch["input_ids"], batch["attention_mask"], return_dict=False)[1]
        assert torch.equal(cache.layers[1].keys, expected[2].layers[1].keys)


def test_a_cache_in_evaluation_is_the_models_own():
    model = llama(use_cache=True)().eval()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        out = model(**without_use_cache())
        assert type(out.past_key_values) is transformers.DynamicCache
        assert declined(kernels) == "a cache is asked for (use_cache)"


def llava() -> Any:
    return with_images("llava")


@pytest.mark.parametrize("make", [llama(), llava], ids=["llama", "llava"])
@pytest.mark.parametrize("prepare", [same, *CHECKPOINTS.values()], ids=["kept", *CHECKPOINTS])
def test_the_host_waits_once_for_a_forward_and_never_for_backward(make, prepare, monkeypatch):
    """Tensors without numbers: whatever asks for one raises, but for the copy of the ids, which is counted here."""
    batch = padded()
    seen = np.where(batch["attention_mask"].numpy() > 0, batch["input_ids"].numpy(), -1)
    waits = []

    def numpy(tensor: torch.Tensor) -> np.ndarray:
        waits.append(tuple(tensor.shape))
        return seen

    apply_npu_kernels(make(), ops=["varlen_attention"]).restore()  # its proof is made, with numbers
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = {name: mode.from_tensor(v) if torch.is_tensor(v) else v for name, v in batch.items()}
    monkeypatch.setattr(FakeTensor, "numpy", numpy, raising=False)
    monkeypatch.setattr(batch_module, "FakeTensor", ())  # which is declined
    with mode:
        model = make()
        kernels = apply_npu_kernels(model, ops=["varlen_attention"])
        loss = loss_of(prepare(model), given)
        assert waits == [(4, 21)]
        loss.backward()
        assert waits == [(4, 21)]
    assert ran(kernels) == 1
