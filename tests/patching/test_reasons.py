"""Guards of calls and modules: each leaves something to the model's own code, and says why."""

import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.utils import parametrize
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from npu_trainer_kernels import apply_npu_kernels, device
from npu_trainer_kernels.ops.attention.segments import Segments
from npu_trainer_kernels.ops.head import vocabulary_slices
from npu_trainer_kernels.patching.body import packed
from tests.models import assert_outcome_close, batch, loss_and_gradients, small_model

from .padded import declined, padded, ran
from .promised import HEAD, IDS, LABELS, formed, outcome, shifted
from .test_settings import Around


def left_alone(kernels: Any, op: str) -> str:
    return "; ".join(each.reason for each in kernels.report().left_alone if each.op == op)


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 0.5}], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_embeddings_that_do_more(options, later):
    (name, value), ids = next(iter(options.items())), torch.tensor([[1, 1, 1, 2]])

    def made() -> Around:
        torch.manual_seed(0)
        return Around(nn.Embedding(7, 8, **({} if later else options)))

    def outcome(model: Around) -> list[torch.Tensor]:
        result = model(ids)
        result.sum().backward()
        gradient = model.inner.weight.grad
        return [result.detach(), gradient.to_dense() if gradient.is_sparse else gradient]

    model, plain = made(), made()
    with apply_npu_kernels(model, ops=["embedding"]) as kernels:
        for each in (model, plain):
            setattr(each.inner, name, value)
        assert all(map(torch.equal, outcome(model), outcome(plain)))
        if later:
            said, reason = "; ".join(each.reason for each in kernels.report().declined), f"its {name} has been changed"
        else:
            said, reason = left_alone(kernels, "embedding"), "it uses max_norm, scale_grad_by_freq or sparse gradients"
        assert said == reason


class Special(torch.Tensor):
    """A tensor that is more than its storage, as quantised and sharded ones are."""


def looked_up(ids: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda embedding: embedding(ids)


def scaled_by_columns(embedding: Any) -> torch.Tensor:
    embedding.embed_scale = torch.linspace(1, 2, 8)
    return embedding(ROW)


ROW = torch.tensor([[1, 1, 1, 2]])
LOOKUPS: dict[str, tuple[str, Callable[[Any], torch.Tensor]]] = {
    "of a kind of their own": ("its ids are no plain int64 or int32 tensor", looked_up(ROW.as_subclass(Special))),
    "with a scale for each column": ("its embed_scale has no number that can be read", scaled_by_columns),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_embeddings_that_are_called_otherwise(name):
    reason, use = LOOKUPS[name]

    def made() -> Around:
        torch.manual_seed(0)
        return Around(Gemma3TextScaledWordEmbedding(7, 8, 0, 3.0))

    def found(model: Around) -> list[torch.Tensor]:
        result = use(model.inner)
        result.sum().backward()
        return [result.detach(), model.inner.weight.grad]

    model = made()
    with apply_npu_kernels(model, ops=["embedding"]) as kernels:
        assert all(map(torch.equal, found(model), found(made())))
        assert [each.reason for each in kernels.report().declined] == [reason]


def test_an_embedding_that_is_called_by_name_is_served():
    torch.manual_seed(0)
    model = Around(Gemma3TextScaledWordEmbedding(7, 8, 0, 3.0))
    expected = model.inner(ROW)
    with apply_npu_kernels(model, ops=["embedding"]) as kernels:
        assert torch.equal(model.inner(input_ids=ROW), expected)
        assert (kernels.report().ran, kernels.report().declined) == ({"embedding": 1}, [])
        with pytest.raises(TypeError):
            model.inner(ROW, ROW)
        assert [each.reason for each in kernels.report().declined] == ["it is given something else than ids"]


# ---------------------------------------------------------------------------------------------------------------------
# Heads, and what is done to logits
# ---------------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def by_name(model: Any) -> torch.Tensor:
    return shifted(model.lm_head(input=model.model(IDS).last_hidden_state))


def as_ever(model: Any) -> torch.Tensor:
    return shifted(model(input_ids=IDS).logits)


def with_twice(model: Any) -> Any:
    parametrize.register_parametrization(model.lm_head, "weight", Twice())
    return model


def with_hook(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)
    return model


HEADS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], torch.Tensor]]] = {
    "in fp64": ("float64 values", lambda model: model.double(), as_ever),
    "hooked": ("it has a hook", with_hook, as_ever),
    "of another weight": ("its weight is computed anew whenever it is read (a parametrization)", with_twice, as_ever),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_called_otherwise(name):
    reason, prepare, step = HEADS[name]
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(prepare(model), step)
        assert reason in {each.reason for each in kernels.report().declined}
    assert all(map(torch.equal, found, outcome(prepare(small_model("llama")), step)))


def test_a_head_that_is_called_by_name_is_served():
    model, plain = small_model("llama"), small_model("llama")
    expected, truth = outcome(plain, by_name), outcome(small_model("llama").double(), by_name)
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(model, by_name)
        assert sum(kernels.report().ran.values()) == 1
        assert kernels.report().declined == []
        with pytest.raises(TypeError):
            model.lm_head(torch.ones(1, 2, 48), IDS)
        assert [each.reason for each in kernels.report().declined] == ["it is given more than hidden states"]
    assert_outcome_close(plain, found, expected, truth, lambda: outcome(plain, by_name))


def test_a_model_without_a_head():
    with apply_npu_kernels(small_model("llama").model, ops=HEAD) as kernels:
        assert left_alone(kernels, "linear_cross_entropy") == "no causal language model found"
        assert left_alone(kernels, "linear_logprob") == "no causal language model found"


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A mesh of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_a_head_that_was_sharded_since(one_rank, dim):
    """By something else than a plan of transformers, which takes hidden states for replicated ones."""

    def found(model: Any) -> list[torch.Tensor]:
        hidden, head = model.model(IDS).last_hidden_state.detach(), model.lm_head
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), one_rank, [Shard(dim)]))
        with implicit_replication():
            loss = shifted(head(hidden).full_tensor())
            loss.backward()
        return [loss.detach(), head.weight.grad.full_tensor()]

    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        assert all(map(torch.equal, found(model), found(small_model("llama"))))
        assert [each.reason for each in kernels.report().declined] == ["it is sharded by columns or rows"]


def test_a_head_of_another_dtype_says_so_as_ever():
    model = small_model("llama")
    hidden = model.model(IDS).last_hidden_state.bfloat16()
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        with pytest.raises(RuntimeError, match="dtype"):
            model.lm_head(hidden)
        (each,) = kernels.report().declined
        assert each.reason == "hidden states of torch.bfloat16 for a weight of torch.float32"


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target, **options)


TARGETS = LABELS[:, 1:].flatten()
STEPS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a factor that overflows": ("by a factor out of range", lambda t: shifted((t * 1e200) * 1e200 * 0.0 + t)),
    "a factor of infinity": ("with something that is no finite number", lambda t: shifted((t / torch.inf) + t)),
    "a divisor of nothing": ("with something that is no finite number", lambda t: shifted(t / 0.0)),
    "a cap of nothing": ("by a factor out of range", lambda t: shifted(torch.tanh(t) * 0.0 + t)),
    "two caps": ("a second time", lambda t: shifted(torch.tanh(torch.tanh(t)))),
    "an old argument": ("with other arguments", lambda t: cross_entropy(t, TARGETS, size_average=False)),
    "a vector": ("a row of logits is taken apart", lambda t: shifted(t.flatten().view(t.shape))),
    "a list of rows": ("by an index of another kind", lambda t: shifted(t[[1, 0]], LABELS[[1, 0]])),
    "a cast that copies": ("with other arguments", lambda t: shifted(t.to(torch.float32, copy=True))),
    "a cast that keeps strides": (
        "with other arguments", lambda t: shifted(t.float(memory_format=torch.preserve_format))
    ),
    "no device": ("on another device", lambda t: shifted(t) * t.to("meta").dim()),
    "the shape of others": (
        "not as its first argument", lambda t: shifted(torch.arange(2.0 * 17 * 331).view_as(t) / 1e4 + t)
    ),
    "classes in the middle": (
        "with targets of another shape", lambda t: nn.functional.cross_entropy(t, torch.arange(662).view(2, 331) % 17)
    ),
    "probabilities": (
        "with targets that are no ids",
        lambda t: cross_entropy(t, torch.full((TARGETS.shape[0], 331), 1 / 331)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", STEPS)
def test_logits_that_are_formed(name):
    reason, use = STEPS[name]

    def loss_of(model: Any) -> torch.Tensor:
        return use(model(input_ids=IDS).logits)

    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(model, loss_of)
        said = formed(kernels)
    expected = outcome(small_model("llama"), loss_of)
    assert any(reason in each for each in said), said
    torch.testing.assert_close(found, expected, equal_nan=True)


class Elsewhere(torch.Tensor):
    """A tensor on a device that no machine has."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (1,), dtype=torch.bfloat16, device="fpga")

    __torch_dispatch__ = None


RAISING: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "class weights of another dtype": (
        "with class weights of another kind", "expected scalar type",
        lambda t: cross_entropy(t, TARGETS, weight=torch.ones(331, dtype=torch.float64)),
    ),
    "four indices": ("by too many indices", "too many indices", lambda t: t[0, 0, 0, 0]),
    "a device of others": ("on another device", "(?i)fpga", lambda t: t.type_as(Elsewhere())),
}  # fmt: skip


@pytest.mark.parametrize("name", RAISING)
def test_what_logits_raise_they_raise_as_ever(name):
    reason, message, use = RAISING[name]
    model = small_model("llama")
    with pytest.raises((RuntimeError, IndexError), match=message) as expected:
        use(model(input_ids=IDS).logits)
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        logits = model(input_ids=IDS).logits
        with pytest.raises(expected.type, match=message):
            use(logits)
        assert any(reason in each for each in formed(kernels))


# ---------------------------------------------------------------------------------------------------------------------
# Rotations and layers
# ---------------------------------------------------------------------------------------------------------------------


def trained_tables(module: nn.Module, args: Any, tables: Any) -> Any:
    return tuple(table.requires_grad_() for table in tables)


def special_tables(module: nn.Module, args: Any, tables: Any) -> Any:
    return tuple(table.as_subclass(Special) for table in tables)


TABLES = {
    trained_tables: "other arguments, or other shapes, than its form has",
    special_tables: "a Special is no plain tensor",
}


@pytest.mark.parametrize("change", TABLES, ids=lambda change: change.__name__)
def test_rotations_by_tables_of_another_kind(change):
    model, plain = small_model("llama"), small_model("llama")
    with apply_npu_kernels(model, ops=["rope"]) as kernels:
        for each in (model, plain):
            each.model.rotary_emb.register_forward_hook(change)
        found = loss_and_gradients(model, batch())
        assert all(map(torch.equal, found, loss_and_gradients(plain, batch())))
        assert {each.reason: each.calls for each in kernels.report().declined} == {TABLES[change]: 2}


class Rotating(LlamaDecoderLayer):
    """Rotates what its MLP reads, too."""

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, position_embeddings=position_embeddings, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        heads = hidden_states.unflatten(-1, (-1, 16)).transpose(1, 2)
        rotated, _ = apply_rotary_pos_emb(heads, heads, *position_embeddings)
        return residual + self.mlp(rotated.transpose(1, 2).flatten(2))


def test_a_forward_that_two_ops_would_rewrite():
    def made(dtype: torch.dtype = torch.float32) -> Any:
        model = small_model("llama").to(dtype)
        for layer in model.model.layers:
            layer.__class__ = Rotating
        return model

    model = made()
    with apply_npu_kernels(model, ops=["add_rms_norm", "rope"]) as kernels:
        found = loss_and_gradients(model, batch())
        # Attentions are served by the one op, layers by the other.
        assert kernels.report().ran == {"add_rms_norm": 2, "rope": 2}
        reasons = {each.module: each.reason for each in kernels.report().left_alone}
        assert reasons == dict.fromkeys(("model.layers.0", "model.layers.1"), "add_rms_norm is in its forward already")
    plain, truth = made(), loss_and_gradients(made(torch.float64), batch())
    expected = loss_and_gradients(plain, batch())
    assert_outcome_close(model, found, expected, truth, lambda: loss_and_gradients(plain, batch()))


# ---------------------------------------------------------------------------------------------------------------------
# Bodies
# ---------------------------------------------------------------------------------------------------------------------


def test_a_body_with_an_encoder():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        assert not kernels.report().sites
        assert "it has an encoder" in left_alone(kernels, "varlen_attention")


def test_copies_in_threads_share_a_configuration():
    model, batch = small_model("llama"), padded()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        model.model._is_replica = True
        model(**batch).loss.backward()
        assert ran(kernels) == 0
        assert "threads run copies of it" in declined(kernels)


# ---------------------------------------------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "hip"), itertools.product(("cuda", "npu", "cpu"), (None, "6.4")))
def test_where_compiled_kernels_are_kept(monkeypatch, kind, hip):
    """On AMD's devices, which are cuda's by name, Triton compiles by the size of a storage, too."""
    monkeypatch.setattr(device, "_KINDS", {"npu": "npu", "cuda": "cuda" if hip is None else "other"})
    where = torch.device("meta") if kind == "npu" else torch.device(kind)
    assert device.keeps_compiled.__wrapped__(where) == (kind == "cuda" and hip is None)


def test_a_decoder_of_an_encoder():
    model = small_model("llama")
    model.model.config.is_encoder_decoder = True
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        assert left_alone(kernels, "varlen_attention") == "it has an encoder"


@pytest.mark.parametrize("given", [(2, 5, 7), (1, 4, 5), (1, 5, 4)], ids=["rows", "queries", "keys"])
def test_attention_to_other_rows_than_the_body_was_given(given):
    rows, queries, keys = given
    packing = packed.Packing(Segments.make([3, 2], torch.device("cpu")), "torch", None, "eager", 5)
    q, k = torch.zeros(rows, 4, queries, 8), torch.zeros(rows, 4, keys, 8)
    with pytest.raises(packed.Unserved, match="its attention takes other rows than the body was given"):
        packed._attention(nn.Module(), q, k, k, packed.PackedMask(packing, None))


def test_a_gate_of_another_shape():
    torch.manual_seed(0)
    x, gate = torch.randn(2, 5, 16), torch.randn(1, 5, 16)

    class Gated(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return self.inner(x, gate)

    model, plain = (Gated(Zamba2RMSNormGated(16, 16)) for _ in range(2))
    with apply_npu_kernels(model, ops=["gated_rms_norm"]) as kernels:
        assert torch.equal(model(x.requires_grad_(), gate), plain(x, gate))
        assert [each.reason for each in kernels.report().declined] == ["x and gate of two shapes"]
        model(x, gate.expand(2, 5, 16).clone())
        assert kernels.report().ran["gated_rms_norm"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Weights that ranks share
# ---------------------------------------------------------------------------------------------------------------------


class Mesh:
    """Of so many ranks in each dimension."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim = shape, len(shape)

    def size(self) -> int:
        return self.shape[0]


@pytest.mark.parametrize(("rows", "mesh", "placements", "reason"), [
    (331, Mesh(2), [Shard(1)], "weight is placed"),
    (331, Mesh(2), [Replicate()], "weight is placed"),
    (331, Mesh(2, 2), [Shard(0), Shard(0)], r"on a mesh of shape \(2, 2\)"),
    (3, Mesh(4), [Shard(0)], "some of 4 ranks have none of the weight's 3 rows"),
    (10, Mesh(4), [Shard(0)], None),
    (5, Mesh(4), [Shard(0)], "some of 4 ranks have none of the weight's 5 rows"),
])  # fmt: skip
def test_heads_that_ranks_share_otherwise(monkeypatch, rows, mesh, placements, reason):
    weight = SimpleNamespace(device_mesh=mesh, placements=placements, shape=(rows, 8))
    monkeypatch.setattr(vocabulary_slices, "DTensor", SimpleNamespace)
    found = vocabulary_slices.unshared(weight, None)
    assert found is None if reason is None else re.search(reason, found)
