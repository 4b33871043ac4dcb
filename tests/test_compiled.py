"""What `torch.compile` makes of the ops: heads keep their kernels, others become plain PyTorch; a name is checked."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from accelerate.utils import compile_regions
from peft import LoraConfig, get_peft_model
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.descriptions import ModelShapes, Workload, of_model
from npu_trainer_kernels.ops import launch
from npu_trainer_kernels.patching import PATCHES
from tests.closeness import assert_as_close, rounded_if_needed
from tests.conftest import DEVICE
from tests.models import SMALL, batch, small_model

SHAPES = ModelShapes(
    hidden=16,
    intermediate=24,
    vocabulary=40,
    heads=2,
    kv_heads=1,
    head_dim=8,
    experts=4,
    slots=2,
    channels=20,
    taps=4,
    state_keys=1,
    state_values=2,
    key_size=6,
    value_size=4,
)
WORKLOADS = of_model(SHAPES, 8, "float32")
HEADS = {
    "linear_cross_entropy", "linear_logprob", "linear_divergence", "linear_divergence_kl", "fused_linear_grpo_loss",
}  # fmt: skip
# Called and not traced: where tokens go, and how many, is known on the device alone; and the attention of generation.
OPAQUE = {"moe_experts", "decode_attention"}

every_op = pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.op)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """The files of `ops/` whose kernels are launched in forward inside the `with` block."""
    files = set()

    def spy(kernel, grid, args, constexprs):
        files.add(kernel.fn.__module__.partition(".ops.")[2])
        launch._run(kernel, grid, args, constexprs)

    with launch.use_launcher(spy):
        yield files


def launched(work: Workload, backend: str | None) -> set[str]:
    """The same of a compiled call of the op."""
    inputs = work.inputs(torch.device(DEVICE))
    with launches() as files:
        torch.compile(work.ours(backend), backend="aot_eager")(inputs.tensors)
    return files


@every_op
@pytest.mark.parametrize("backend", ["tritn", "rmsnorm=torch"])
def test_a_wrong_name_is_refused_inside_a_graph(work, backend):
    with pytest.raises(ValueError, match=r"backend must be one of triton|unknown op 'rmsnorm'"):
        launched(work, backend)


@every_op
def test_a_wrong_name_in_the_environment_is_refused_inside_a_graph(work, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "tritn")
    with pytest.raises(ValueError, match=r"NPU_KERNELS_BACKEND must be one of triton.*; got 'tritn'"):
        launched(work, None)


@every_op
def test_heads_and_what_is_not_traced_keep_their_kernels(work):
    assert bool(launched(work, "triton")) == (work.op in HEADS | OPAQUE)


def test_of_a_compiled_model_trls_head_keeps_its_kernels():
    from trl.trainer.utils import add_fused_lm_head

    model = small_model("llama").to(DEVICE)
    add_fused_lm_head(model)
    ids = torch.randint(3, 300, (2, 7), device=DEVICE)
    with apply_npu_kernels(model, ops=list(PATCHES), backend="triton"), launches() as files:
        compiled = torch.compile(model, backend="aot_eager")
        compiled(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    assert files
    assert all(file.startswith("head.") for file in files), files


# ---------------------------------------------------------------------------------------------------------------------
# A model's own head
# ---------------------------------------------------------------------------------------------------------------------


class Graphs:
    """A backend that runs graphs as they are; how many there were, and whether logits are formed in one."""

    def __init__(self) -> None:
        self.count, self.logits = 0, False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        self.count += 1
        values = tree_leaves([node.meta.get("example_value") for node in graph.graph.nodes])
        sizes = [value.shape[-1] for value in values if isinstance(value, torch.Tensor) and value.dim()]
        # A length that is no number yet would become one if it were compared.
        self.logits |= any(isinstance(size, int) and size == SMALL["vocab_size"] for size in sizes)
        return graph


def around(model, **options):
    return torch.compile(lambda **inputs: model(**inputs), **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def body(model, **options):
    model.model = torch.compile(model.model, **options)
    return model


def layers(model, **options):
    for layer in model.model.layers:
        layer.compile(**options)
    return model


WAYS = {"the model": torch.compile, "in place": in_place, "a function": around, "the body": body}
LENGTHS = (17, 21, 33, 40)


def losses_and_gradients(call, model, lengths=LENGTHS, **kwargs) -> list[torch.Tensor]:
    found = []
    for length in lengths:
        model.zero_grad()
        loss = call(**batch(length=length), **kwargs).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
    return found


def compare(found, make, **kwargs) -> None:
    """With what the model does by itself, uncompiled."""
    expected, exact = make(), make().double()
    pairs = (losses_and_gradients(model, model, **kwargs) for model in (expected, exact))
    moved = rounded_if_needed(lambda: losses_and_gradients(expected, expected, **kwargs))
    for i, (actual, reference, truth) in enumerate(zip(found, *pairs, strict=True)):
        assert_as_close(actual, reference, truth, f"value {i}", moved(i))


def served(kernels) -> int:
    return kernels.report().ran["linear_cross_entropy"]


@pytest.mark.full("gemma2", "a function", "in place", "the body")
@pytest.mark.parametrize(("way", "family"), [*((way, "llama") for way in WAYS), ("the model", "gemma2")])
def test_a_compiled_models_head_is_fused(way, family):
    model, graphs = small_model(family), Graphs()
    with apply_npu_kernels(model, ops=list(PATCHES)) as kernels:
        compiled = WAYS[way](model, backend=graphs)
        found = losses_and_gradients(compiled, model)
        out = compiled(**batch())
        assert out.logits.shape == (2, 17, 331)
        assert out.logits.state.real is None
        assert served(kernels) == len(LENGTHS) + 1
        # A body inside a compiled model is called by what no graph has, and is one by itself.
        declined = {each.op: each.reason for each in kernels.report().declined}
        assert declined == ({} if way == "the body" else {"varlen_attention": "it is compiled"})
    # The layers are one graph: first for one length, then for all others.
    assert graphs.count == 2
    assert not graphs.logits
    compare(found, lambda: small_model(family))


@pytest.mark.full("layers")
@pytest.mark.parametrize("way", [layers, compile_regions], ids=["layers", "regions"])
def test_a_head_beside_compiled_regions_is_fused(way):
    model, graphs = small_model("llama"), Graphs()
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as kernels:
        found = losses_and_gradients(way(model, backend=graphs), model)
        assert served(kernels) == len(LENGTHS)
    assert graphs.count
    assert not graphs.logits
    compare(found, lambda: small_model("llama"))


def test_a_head_under_lora_is_fused():
    def make():
        torch.manual_seed(0)
        return get_peft_model(small_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    model, graphs = make(), Graphs()
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as kernels:
        found = losses_and_gradients(torch.compile(model, backend=graphs), model)
        assert served(kernels) == len(LENGTHS)
    assert graphs.count == 2
    compare(found, make)


class ZLoss(LlamaForCausalLM):
    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        out.loss = out.loss + 0.01 * out.logits.float().logsumexp(-1).square().mean()
        return out


@pytest.mark.full("True")
@pytest.mark.parametrize("hooked", [False, True])
def test_what_uses_logits_has_them(hooked):
    """A subclass's term, and a hook of a user's on the head."""

    def make():
        model = small_model("llama")
        model.__class__ = ZLoss
        if hooked:
            model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        return model

    model, graphs = make(), Graphs()
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as kernels:
        found = losses_and_gradients(torch.compile(model, backend=graphs), model)
        assert served(kernels) == (0 if hooked else len(LENGTHS))
    assert graphs.count == 2
    compare(found, make)


@pytest.mark.full("the body", "in place", "a function")
@pytest.mark.parametrize("way", WAYS)
def test_without_breaks_it_is_fused_where_the_model_begins_the_graph(way):
    """`fullgraph=True`: the layers are one graph; where a graph has begun before, the head is the model's own in it."""
    model, graphs = small_model("llama"), Graphs()
    with apply_npu_kernels(model, ops=["linear_cross_entropy", "linear_logprob"]) as kernels:
        found = losses_and_gradients(WAYS[way](model, backend=graphs, fullgraph=True), model)
        assert served(kernels) == (0 if way == "a function" else len(LENGTHS))
    assert graphs.count == 2
    assert graphs.logits == (way == "a function")
    compare(found, lambda: small_model("llama"))


def test_a_head_compiled_alone_without_breaks_is_its_own():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as kernels:
        model.lm_head = torch.compile(model.lm_head, backend="eager", fullgraph=True)
        found = losses_and_gradients(model, model)
        assert served(kernels) == 0
    compare(found, lambda: small_model("llama"))


@pytest.mark.parametrize("way", [torch.compile, around], ids=["the model", "a function"])
@pytest.mark.parametrize("full", [False, True])
def test_evaluation_is_one_graph(way, full):
    model, graphs = small_model("llama"), Graphs()
    expected = model.eval()(**batch())
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]), torch.no_grad():
        found = way(model, backend=graphs, fullgraph=full)(**batch())
    assert graphs.count == 1
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_a_model_that_is_compiled_already_is_served_and_restored():
    model, graphs = small_model("llama"), Graphs()
    classes = [type(module) for module in model.modules()]
    compiled = torch.compile(model, backend=graphs)
    with apply_npu_kernels(compiled, ops=["linear_cross_entropy"]) as kernels:
        found = losses_and_gradients(compiled, model)
        kernels.refresh()
        losses_and_gradients(compiled, model)
        assert served(kernels) == 2 * len(LENGTHS)
    assert graphs.count == 2
    compare(found, lambda: small_model("llama"))
    assert [type(module) for module in model.modules()] == classes
    assert type(compiled(**batch()).logits) is torch.Tensor


def test_a_copy_of_a_patched_model_is_served_and_restored_by_itself():
    model, graphs = small_model("llama"), Graphs()
    classes = [type(module) for module in model.modules()]
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]):
        twin = copy.deepcopy(model)
    with apply_npu_kernels(twin, ops=["linear_cross_entropy"]) as kernels:
        losses_and_gradients(torch.compile(twin, backend=graphs), twin)
        assert served(kernels) == len(LENGTHS)
    assert graphs.count == 2
    assert [type(module) for module in twin.modules()] == classes


def test_a_body_that_raises_leaves_the_compiler_as_it_was():
    model, graphs = small_model("llama"), Graphs()
    handle = model.model.register_forward_hook(lambda module, args, output: 1 / 0)
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]):
        compiled = torch.compile(model, backend=graphs)
        with pytest.raises(ZeroDivisionError):
            compiled(**batch())
        handle.remove()
        assert get_eval_frame_callback() is None
        compiled(**batch()).loss.backward()
    assert graphs.count
