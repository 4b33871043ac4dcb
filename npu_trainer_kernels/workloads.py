"""The ops at the shapes of a model: inputs on any device, the op's call, and plain PyTorch's.

`npu-kernels doctor` and `tune` and the benchmarks, which all run single ops, share this table.

    shapes = ModelShapes.of_config(config)
    for workload in of_model(shapes, tokens=4096, dtype="bfloat16"):
        inputs = workload.inputs(device)
        ours, plain = workload.ours("triton"), workload.reference
        inputs.backward(ours(inputs.tensors))
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from . import ops
from .ops.head import GrpoTokens, token_losses
from .support.configs import EXPERTS, SLOTS, rotated_share, setting
from .table import FORMS, op_of

__all__ = [
    "DTYPES",
    "EPS",
    "GRPO_BETA",
    "GRPO_EPSILON",
    "OPS",
    "Inputs",
    "ModelShapes",
    "OpWorkload",
    "Outputs",
    "Tensors",
    "Workload",
    "as_tuple",
    "attention_lengths",
    "grpo_lengths",
    "grpo_terms",
    "of_model",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = 1e-6
_TOKENS = ("N", "S", "BT", "B", "T")
# Sizes of a batch that are not factors of its number of tokens.
_OF_BATCH = ("live", "shared")
GRPO_BETA, GRPO_EPSILON = 0.04, 0.2
_GRPO = ops.GrpoOptions(loss_type="bnpo", beta=GRPO_BETA, epsilon_low=GRPO_EPSILON, epsilon_high=GRPO_EPSILON)
Tensors = Mapping[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]
Function = Callable[[Tensors], Outputs]


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@dataclass
class Inputs:
    """One set of inputs.

    Attributes:
        tensors: the tensors, by the names that references and calls use.
        leaves: the names of tensors that need a gradient.
        grads: the incoming gradients of backward, one for each output; empty if the output is a scalar loss.
    """

    tensors: dict[str, Tensor]
    leaves: tuple[str, ...]
    grads: tuple[Tensor, ...] = ()

    def require_grad(self) -> "Inputs":
        for name in self.leaves:
            self.tensors[name].requires_grad_()
        return self

    def drop_grads(self) -> None:
        for name in self.leaves:
            self.tensors[name].grad = None

    def leaf_grads(self) -> dict[str, Tensor | None]:
        return {name: self.tensors[name].grad for name in self.leaves}

    def backward(self, outputs: Outputs) -> None:
        """Runs backward from `outputs` and stores the gradients in the leaves' `.grad`.

        It does not call `outputs.backward()`: if two leaves share one gradient tensor, that copies it for the second, a
        pass over memory that neither the op nor a model makes.
        """
        leaves = [self.tensors[name] for name in self.leaves]
        found = torch.autograd.grad(list(as_tuple(outputs)), leaves, list(self.grads) or None, allow_unused=True)
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient

    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors.values(), *self.grads))


@dataclass(frozen=True)
class Workload:
    """An op at one shape.

    Attributes:
        op: a key of `OPS`.
        sizes: the sizes that the op's builder needs, by name.
        dtype: the dtype of inputs and weights, a key of `DTYPES`.
    """

    op: str
    sizes: Mapping[str, int] = field(hash=False)
    dtype: str = "bfloat16"

    @property
    def shape(self) -> str:
        """The sizes as text, for example `BT=8192 H=4096 V=128256`."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding."""
        s = self.sizes
        if "live" in s:
            return s["shared"] + sum(attention_lengths(s["B"], s["T"], s["live"], s["shared"]))
        return math.prod(size for name, size in self.sizes.items() if name in _TOKENS)

    @property
    def model_sizes(self) -> tuple[tuple[str, int], ...]:
        """The sizes that depend on the model, in the order of `backends.Shape`."""
        return tuple((name, size) for name, size in self.sizes.items() if name not in (*_TOKENS, *_OF_BATCH))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def backend_op(self) -> str:
        """The op's name in `backends.OPS`."""
        return op_of(self.op)

    @property
    def reference(self) -> Function:
        return OPS[self.op].reference

    def inputs(self, device: torch.device) -> Inputs:
        return OPS[self.op].build(self, device).require_grad()

    def ours(self, backend: str | None) -> Function:
        """Returns the op as a function of the inputs' tensors. With None, `backends.choose` decides the backend."""
        return OPS[self.op].ours(backend)


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a causal language model that the ops' shapes depend on; 0 for parts that it does not have.

    Attributes:
        hidden, intermediate, vocabulary: sizes of the residual stream, of the MLP (of one expert, if there are
            experts), and of the LM head.
        heads, kv_heads, head_dim: sizes of attention.
        experts, slots: the number of experts of a layer, and the number of experts per token.
        rotated: the fraction of a head that rotates.
    """

    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    slots: int = 0
    rotated: float = 1.0

    @classmethod
    def of_config(cls, config: Any) -> "ModelShapes":
        """Reads a transformers config: of a model with several parts the text part, of different layers the first one.

        Raises:
            ValueError: the config has no size of the residual stream or the LM head, or a size that is not a positive
                int.
        """
        text = config.get_text_config()

        def size(*names: str, default: int | None = 0, least: int = 0) -> int:
            found = setting(text, *names)
            value = default if found is None else found[0] if isinstance(found, list) else found
            if type(value) is not int or value < least:
                raise ValueError(
                    f"the config of {type(config).__name__} must have a positive {names[-1]}; got {value!r}"
                )
            return value

        hidden, heads = size("hidden_size", default=None, least=1), size("num_attention_heads")
        return cls(
            hidden=hidden,
            intermediate=size("moe_intermediate_size", "intermediate_size"),
            vocabulary=size("vocab_size", default=None, least=1),
            heads=heads,
            kv_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=hidden // heads if heads else 0),
            experts=size(*EXPERTS),
            slots=size(*SLOTS),
            rotated=rotated_share(text),
        )


@dataclass(frozen=True)
class OpWorkload:
    """The calls of a form of an op.

    Attributes:
        build: makes the inputs of a workload on a device.
        reference: plain PyTorch, from tensors to outputs; it computes in fp64 if the inputs are fp64.
        ours: returns the op with a backend.
        sizes: returns the sizes of a `Workload` for a model and a number of tokens, with 0 for a part that it lacks.
    """

    build: Callable[[Workload, torch.device], Inputs]
    reference: Function
    ours: Callable[[str | None], Function]
    sizes: Callable[[ModelShapes, int], dict[str, int]]


def _randn(work: Workload, device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(work.torch_dtype)


# ---------------------------------------------------------------------------------------------------------------------
# LM head
# ---------------------------------------------------------------------------------------------------------------------


def _head_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"BT": tokens, "H": model.hidden, "V": model.vocabulary}


def _head_weight(work: Workload, device: torch.device) -> Tensor:
    # Scaled so that the logits have a standard deviation near one.
    return _randn(work, device, work.sizes["V"], work.sizes["H"], scale=work.sizes["H"] ** -0.5)


def _build_cross_entropy(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    x = _randn(work, device, s["BT"], s["H"])
    target = torch.randint(s["V"], (s["BT"],), device=device)
    return Inputs({"x": x, "weight": _head_weight(work, device), "target": target}, ("x", "weight"))


def _cross_entropy_reference(t: Tensors) -> Outputs:
    return ops.linear_cross_entropy_reference(t["x"], t["weight"], t["target"])


def _cross_entropy(backend: str | None) -> Function:
    return lambda t: ops.fused_linear_cross_entropy(t["x"], t["weight"], t["target"], backend=backend)  # type: ignore[return-value]


def _build_logprob(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_cross_entropy(work, device)
    inputs.tensors["ids"] = inputs.tensors.pop("target")
    inputs.grads = (torch.randn(work.sizes["BT"], device=device) / work.sizes["BT"],)
    return inputs


def _logprob_reference(t: Tensors) -> Outputs:
    return _log_prob_eager(t["x"], t["weight"], t["ids"])


def _logprob(backend: str | None) -> Function:
    return lambda t: ops.linear_logprob(t["x"], t["weight"], t["ids"], backend=backend).log_prob


def grpo_lengths(batch: int, length: int) -> Tensor:
    """Returns lengths of completions, 60% to 100% of `length` and 80% on average."""
    return (torch.linspace(0.6, 1.0, batch, dtype=torch.float64) * length).round().long()


def _build_grpo(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    shape = (s["B"], s["T"])
    x = _randn(work, device, *shape, s["H"])
    weight = _head_weight(work, device)
    ids = torch.randint(s["V"], shape, device=device)
    mask = torch.arange(s["T"], device=device) < grpo_lengths(*shape).to(device).unsqueeze(1)
    with torch.no_grad():
        near = torch.stack([_log_prob_eager(x[b], weight, ids[b]) for b in range(s["B"])])
    tensors = {
        "x": x,
        "weight": weight,
        "ids": ids,
        "mask": mask,
        "advantages": torch.randn(s["B"], device=device),
        "old": near + 0.1 * torch.randn(shape, device=device),
        "ref": near + 0.1 * torch.randn(shape, device=device),
    }
    return Inputs(tensors, ("x", "weight"))


def _log_prob_eager(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Computes log-probabilities as a trainer without a fused head does. The ops' references would be a slower baseline
    and make all other implementations look better, because they compute more statistics."""
    logits = torch.nn.functional.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def grpo_terms(log_prob: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """Computes the loss of each token: clipped policy gradient plus the KL penalty."""
    unread = log_prob.new_empty(0)  # fields that a token-level loss does not read
    tokens = GrpoTokens(advantages, unread, unread, old, ref, None, None, None, unread, unread)
    return token_losses(log_prob, tokens, _GRPO)


def _grpo_reference(t: Tensors) -> Outputs:
    log_prob = _log_prob_eager(t["x"], t["weight"], t["ids"])
    terms = grpo_terms(log_prob, t["old"], t["ref"], t["advantages"].unsqueeze(1))
    return (terms * t["mask"]).sum() / t["mask"].sum()


def _grpo(backend: str | None) -> Function:
    def call(t: Tensors) -> Outputs:
        return ops.fused_linear_grpo_loss(
            t["x"], t["weight"], t["ids"], t["advantages"], completion_mask=t["mask"], old_log_prob=t["old"],
            ref_log_prob=t["ref"], options=_GRPO, backend=backend,
        ).loss  # fmt: skip

    return call


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise ops
# ---------------------------------------------------------------------------------------------------------------------


def _build_norm(work: Workload, device: torch.device) -> Inputs:
    shape = work.sizes["N"], work.sizes["H"]
    weight = (1 + 0.1 * torch.randn(shape[1], device=device)).to(work.torch_dtype)
    tensors = {"x": _randn(work, device, *shape), "weight": weight}
    return Inputs(tensors, ("x", "weight"), (_randn(work, device, *shape),))


def _norm_reference(t: Tensors) -> Outputs:
    return ops.rms_norm_reference(t["x"], t["weight"], EPS)


def _norm(backend: str | None) -> Function:
    return lambda t: ops.rms_norm(t["x"], t["weight"], EPS, backend=backend)


def _build_linear_norm(work: Workload, device: torch.device) -> Inputs:
    rows, hidden, heads, size = (work.sizes[name] for name in ("N", "H", "Q", "D"))
    tensors = {
        "x": _randn(work, device, rows, hidden),
        "weight": _randn(work, device, heads * size, hidden, scale=hidden**-0.5),
        "norm_weight": _randn(work, device, size),
    }
    return Inputs(tensors, ("x", "weight", "norm_weight"), (_randn(work, device, rows, heads, size),))


def _linear_norm_reference(t: Tensors) -> Outputs:
    return ops.linear_rms_norm_reference(t["x"], t["weight"], t["norm_weight"], eps=EPS)


def _linear_norm(backend: str | None) -> Function:
    return lambda t: ops.linear_rms_norm(t["x"], t["weight"], t["norm_weight"], eps=EPS, backend=backend)


def _build_add_norm(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_norm(work, device)
    shape = work.sizes["N"], work.sizes["H"]
    inputs.tensors["residual"] = _randn(work, device, *shape)
    inputs.leaves = ("x", "residual", "weight")
    inputs.grads = (*inputs.grads, _randn(work, device, *shape))
    return inputs


def _add_norm_reference(t: Tensors) -> Outputs:
    return ops.add_rms_norm_reference(t["x"], t["residual"], t["weight"], EPS)


def _add_norm(backend: str | None) -> Function:
    return lambda t: ops.add_rms_norm(t["x"], t["residual"], t["weight"], EPS, backend=backend)


def _layer_norm_reference(t: Tensors) -> Outputs:
    return ops.layer_norm_reference(t["x"], t["weight"], None, EPS)


def _layer_norm(backend: str | None) -> Function:
    return lambda t: ops.layer_norm(t["x"], t["weight"], None, EPS, backend=backend)


def _build_gated_norm(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_norm(work, device)
    inputs.tensors["gate"] = _randn(work, device, work.sizes["N"], work.sizes["H"])
    inputs.leaves = ("x", "gate", "weight")
    return inputs


def _gated_norm_reference(t: Tensors) -> Outputs:
    return ops.gated_rms_norm_reference(t["x"], t["gate"], t["weight"], EPS)


def _gated_norm(backend: str | None) -> Function:
    return lambda t: ops.gated_rms_norm(t["x"], t["gate"], t["weight"], EPS, backend=backend)


def _build_embedding(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    ids = torch.randint(s["V"], (s["N"],), device=device)
    tensors = {"weight": _randn(work, device, s["V"], s["D"]), "ids": ids}
    return Inputs(tensors, ("weight",), (_randn(work, device, s["N"], s["D"]),))


def _embedding_reference(t: Tensors) -> Outputs:
    return ops.embedding_reference(t["ids"], t["weight"])


def _embedding(backend: str | None) -> Function:
    return lambda t: ops.embedding(t["ids"], t["weight"], backend=backend)


def _build_swiglu(work: Workload, device: torch.device) -> Inputs:
    shape = work.sizes["N"], work.sizes["I"]
    tensors = {"gate": _randn(work, device, *shape), "up": _randn(work, device, *shape)}
    return Inputs(tensors, ("gate", "up"), (_randn(work, device, *shape),))


def _swiglu_reference(t: Tensors) -> Outputs:
    return ops.swiglu_reference(t["gate"], t["up"])


def _swiglu(backend: str | None) -> Function:
    return lambda t: ops.swiglu(t["gate"], t["up"], backend=backend)


def _geglu_reference(t: Tensors) -> Outputs:
    return ops.swiglu_reference(t["gate"], t["up"], activation="gelu_tanh")


def _geglu(backend: str | None) -> Function:
    return lambda t: ops.swiglu(t["gate"], t["up"], activation="gelu_tanh", backend=backend)


def _build_swiglu_linear(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_swiglu(work, device)
    inputs.tensors["weight"] = _randn(work, device, work.sizes["H"], work.sizes["I"], scale=work.sizes["I"] ** -0.5)
    inputs.leaves = ("gate", "up", "weight")
    inputs.grads = (_randn(work, device, work.sizes["N"], work.sizes["H"]),)
    return inputs


def _swiglu_linear_reference(t: Tensors) -> Outputs:
    return ops.swiglu_linear_reference(t["gate"], t["up"], t["weight"])


def _swiglu_linear(backend: str | None) -> Function:
    return lambda t: ops.swiglu_linear(t["gate"], t["up"], t["weight"], backend=backend)


def _build_rope(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes

    def heads(count: int) -> Tensor:
        # The layout of attention: [B, S, heads, D] in memory, viewed as [B, heads, S, D].
        return _randn(work, device, 1, s["S"], count, s["D"]).transpose(1, 2)

    frequency = 1.0 / 500000.0 ** (torch.arange(0, s["D"], 2, device=device) / s["D"])
    angle = torch.arange(s["S"], device=device).unsqueeze(1) * frequency
    angle = torch.cat((angle, angle), -1).unsqueeze(0)
    tensors = {
        "q": heads(s["Q"]),
        "k": heads(s["K"]),
        "cos": angle.cos().to(work.torch_dtype),
        "sin": angle.sin().to(work.torch_dtype),
    }
    return Inputs(tensors, ("q", "k"), (heads(s["Q"]), heads(s["K"])))


def _rope_reference(t: Tensors) -> Outputs:
    return ops.rope_reference(t["q"], t["k"], t["cos"], t["sin"])


def _rope(backend: str | None) -> Function:
    return lambda t: ops.rope(t["q"], t["k"], t["cos"], t["sin"], backend=backend)


def _rope_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"S": tokens, "Q": model.heads, "K": model.kv_heads, "D": model.head_dim}


def _build_rope_by_turns(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_rope(work, device)
    # Half of each head rotates, as in GLM-4; the op reads the first half of tables of half the width.
    for name in ("cos", "sin"):
        inputs.tensors[name] = inputs.tensors[name][..., : work.sizes["D"] // 2].contiguous()
    return inputs


_BY_TURNS: dict[str, Any] = {"pairs": "interleaved", "tables": "first_half"}


def _rope_by_turns_reference(t: Tensors) -> Outputs:
    return ops.rope_reference(t["q"], t["k"], t["cos"], t["sin"], **_BY_TURNS)


def _rope_by_turns(backend: str | None) -> Function:
    return lambda t: ops.rope(t["q"], t["k"], t["cos"], t["sin"], backend=backend, **_BY_TURNS)


# ---------------------------------------------------------------------------------------------------------------------
# Attention by segments
# ---------------------------------------------------------------------------------------------------------------------


def attention_lengths(batch: int, length: int, live: int, shared: int = 0) -> tuple[int, ...]:
    """Returns the number of tokens of each row after the tokens that all rows share, at least 1.

    Args:
        batch, length: the size of the padded batch.
        live: the percentage of positions that contain a token: 37 (lengths of an exponential distribution with a mean
            of 0.4 of the longest, between 0.05 of that and all of it), 78 (evenly spread from 56% to all) or 100.
        shared: the number of tokens at the beginning of every row that all rows share.
    """
    middles = (np.arange(batch) + 0.5) / batch
    shares = {37: np.clip(-0.4 * np.log(1 - middles), 0.05, 1), 78: np.linspace(0.56, 1, batch), 100: np.ones(batch)}
    return tuple(max(1, round(float(share) * (length - shared))) for share in shares[live])


@dataclass(frozen=True, eq=False)
class _Rows:
    """A batch with padding, and its packed row of tokens.

    Attributes:
        segments: the segments of the packed row.
        padded: for each position of the batch its token in the packed row, or -1 for padding.
        packed: for each token of the packed row its (first) position in the batch.
        seen: `[B, 1, L, L]`, the attention mask.
        batch: B.
    """

    segments: ops.Segments
    padded: ops.Shared
    packed: ops.Shared
    seen: Tensor
    batch: int


@functools.lru_cache(maxsize=4)
def _rows(lengths: tuple[int, ...], device: torch.device) -> _Rows:
    """Makes the batch once, as all layers of a forward share it. `lengths` has the length of the part that all rows
    share, then that of the rest of each row."""
    shared, *own = lengths
    ends = np.cumsum(own) + shared
    widest, first = shared + max(own), np.arange(shared)
    padded = np.full((len(own), widest), -1)
    keys = [first] if shared else []
    for row, (end, length) in enumerate(zip(ends, own, strict=True)):
        tokens = np.concatenate((first, np.arange(end - length, end)))
        padded[row, : shared + length] = tokens
        keys.append(tokens)
    n = int(ends[-1])
    several = ops.Shared.make(np.concatenate(keys), n, device) if shared else None
    segments = ops.Segments.make(
        [shared, *own] if shared else own, device, [len(part) for part in keys] if shared else None, several
    )
    flat = padded.reshape(-1)
    places = np.flatnonzero(flat >= 0)
    _, at = np.unique(flat[places], return_index=True)
    live = torch.from_numpy(padded >= 0).to(device)
    seen = torch.ones(widest, widest, dtype=torch.bool, device=device).tril() & live[:, None, None, :]
    return _Rows(
        segments, ops.Shared.make(flat, n, device), ops.Shared.make(places[at], flat.size, device), seen, len(own)
    )


def _rows_of(t: Tensors) -> _Rows:
    return _rows(tuple(t["lengths"].tolist()), t["q"].device)


def _build_attention(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    lengths = s["shared"], *attention_lengths(s["B"], s["T"], s["live"], s["shared"])
    n = sum(lengths)
    tensors = {
        "q": _randn(work, device, n, s["Q"], s["D"]),
        "k": _randn(work, device, n, s["K"], s["D"]),
        "v": _randn(work, device, n, s["K"], s["D"]),
        "lengths": torch.tensor(lengths),
    }
    return Inputs(tensors, ("q", "k", "v"), (_randn(work, device, n, s["Q"], s["D"]),))


def _attention_reference(t: Tensors) -> Outputs:
    """Computes attention of the padded batch with a mask and repeated heads, as models do. It computes a shared token
    once in each row. Padding and packing take a few percent of its time."""
    rows = _rows_of(t)

    def batch(x: Tensor) -> Tensor:
        return ops.take(x, rows.padded).view(rows.batch, -1, *x.shape[1:]).transpose(1, 2)

    q, k, v = (batch(t[name]) for name in ("q", "k", "v"))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, rows.seen).transpose(1, 2)
    return ops.take(out.reshape(-1, *out.shape[2:]), rows.packed)


def _attention(backend: str | None) -> Function:
    return lambda t: ops.varlen_attention(t["q"], t["k"], t["v"], _rows_of(t).segments, backend=backend)


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts
# ---------------------------------------------------------------------------------------------------------------------


def _build_experts(work: Workload, device: torch.device) -> Inputs:
    n, hidden, inner, experts, slots = (work.sizes[name] for name in ("N", "H", "I", "E", "k"))
    # The output of a router: k different experts for each token, with probabilities that sum to one.
    scores, ids = torch.randn(n, experts, device=device).softmax(-1).topk(slots)
    tensors = {
        "x": _randn(work, device, n, hidden),
        "ids": ids,
        "probabilities": (scores / scores.sum(-1, keepdim=True)).to(work.torch_dtype),
        "gate_up_weight": _randn(work, device, experts, 2 * inner, hidden, scale=hidden**-0.5),
        "down_weight": _randn(work, device, experts, hidden, inner, scale=inner**-0.5),
    }
    leaves = ("x", "probabilities", "gate_up_weight", "down_weight")
    return Inputs(tensors, leaves, (_randn(work, device, n, hidden),))


def _experts_reference(t: Tensors) -> Outputs:
    return ops.moe_experts_reference(t["x"], t["ids"], t["probabilities"], t["gate_up_weight"], t["down_weight"])


def _experts(backend: str | None) -> Function:
    return lambda t: ops.moe_experts(
        t["x"], t["ids"], t["probabilities"], t["gate_up_weight"], t["down_weight"], backend=backend
    )


def _experts_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"N": tokens, "H": model.hidden, "I": model.intermediate, "E": model.experts, "k": model.slots}


OPS: dict[str, OpWorkload] = {
    "rms_norm": OpWorkload(_build_norm, _norm_reference, _norm, lambda m, n: {"N": n, "H": m.hidden}),
    "linear_rms_norm": OpWorkload(
        _build_linear_norm, _linear_norm_reference, _linear_norm,
        lambda m, n: {"N": n, "H": m.hidden, "Q": m.heads, "D": m.head_dim},
    ),
    "add_rms_norm": OpWorkload(_build_add_norm, _add_norm_reference, _add_norm, lambda m, n: {"N": n, "H": m.hidden}),
    "gated_rms_norm": OpWorkload(
        _build_gated_norm, _gated_norm_reference, _gated_norm, lambda m, n: {"N": n, "H": m.hidden}
    ),
    "layer_norm": OpWorkload(_build_norm, _layer_norm_reference, _layer_norm, lambda m, n: {"N": n, "H": m.hidden}),
    "swiglu": OpWorkload(_build_swiglu, _swiglu_reference, _swiglu, lambda m, n: {"N": n, "I": m.intermediate}),
    "swiglu_linear": OpWorkload(
        _build_swiglu_linear, _swiglu_linear_reference, _swiglu_linear,
        lambda m, n: {"N": n, "I": m.intermediate, "H": m.hidden},
    ),
    "geglu": OpWorkload(_build_swiglu, _geglu_reference, _geglu, lambda m, n: {"N": n, "I": m.intermediate}),
    "moe_experts": OpWorkload(_build_experts, _experts_reference, _experts, _experts_sizes),
    "rope": OpWorkload(_build_rope, _rope_reference, _rope, _rope_sizes),
    "rope_by_turns": OpWorkload(_build_rope_by_turns, _rope_by_turns_reference, _rope_by_turns, _rope_sizes),
    "varlen_attention": OpWorkload(
        _build_attention, _attention_reference, _attention,
        lambda m, n: {
            "B": 8, "T": n // 8, "live": 37, "shared": max(1, n // 256), "Q": m.heads, "K": m.kv_heads, "D": m.head_dim,
        },
    ),
    "embedding": OpWorkload(
        _build_embedding, _embedding_reference, _embedding, lambda m, n: {"N": n, "V": m.vocabulary, "D": m.hidden}
    ),
    "linear_cross_entropy": OpWorkload(_build_cross_entropy, _cross_entropy_reference, _cross_entropy, _head_sizes),
    "linear_logprob": OpWorkload(_build_logprob, _logprob_reference, _logprob, _head_sizes),
    "fused_linear_grpo_loss": OpWorkload(
        _build_grpo, _grpo_reference, _grpo,
        lambda m, n: {"B": 8, "T": n // 8, "H": m.hidden, "V": m.vocabulary},
    ),
}  # fmt: skip
"""One entry for each form in the table of ops (`table.FORMS`)."""


def of_model(shapes: ModelShapes, tokens: int, dtype: str) -> list[Workload]:
    """Returns every op that a model can use, at its shapes.

    Args:
        shapes: the model.
        tokens: the number of tokens of a micro-batch; for GRPO these are 8 completions of equal length.
        dtype: a key of `DTYPES`.

    Raises:
        ValueError: fewer than 8 tokens, or an unknown dtype.
    """
    if tokens < 8:
        raise ValueError(f"tokens must be at least 8; got {tokens}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    every = ((form, OPS[form].sizes(shapes, tokens)) for form in FORMS)
    return [Workload(form, sizes, dtype) for form, sizes in every if all(sizes.values())]
