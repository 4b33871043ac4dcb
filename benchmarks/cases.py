"""The table: which ops are measured at which shapes, on which inputs, against which floor and which truth.

A row of the table is a `Case`. What an op needs is an `OpSpec`: inputs, the plain PyTorch reference, the result in
higher precision, and the fewest operations and bytes that any implementation must spend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_trainer_kernels import ops

__all__ = ["EPS", "OPS", "Case", "Inputs", "OpSpec", "Work", "grpo_terms", "grpo_tokens", "table"]

EPS = 1e-6
GRPO_BETA, GRPO_EPSILON = 0.04, 0.2
Tensors = Mapping[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        op: a key of `OPS`.
        sizes: what the op's builder needs, by name.
        dtype: of inputs and weights, `"bfloat16"` or `"float32"`.
        group: `"ops"`, or `"scaling-<axis>"` for a curve over one size.
        modes: what is timed.
    """

    op: str
    sizes: Mapping[str, int] = field(hash=False)
    dtype: str = "bfloat16"
    group: str = "ops"
    modes: tuple[str, ...] = ("forward", "backward", "both")

    @property
    def shape(self) -> str:
        """For people, and part of a row's key: `BT=8192 H=4096 V=128256`."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def key(self) -> str:
        return f"{self.group}/{self.op}/{self.shape}/{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]


@dataclass
class Inputs:
    """One set of inputs.

    Attributes:
        tensors: by the names that references and providers use.
        leaves: those that need a gradient.
        grads: what arrives in backward, one for each output; empty where the output is a scalar loss.
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

    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors.values(), *self.grads))


@dataclass(frozen=True)
class Work:
    """The least that a mode costs: operations on the matrix unit, and bytes to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0


Truth = tuple[tuple[Tensor, ...], dict[str, Tensor]]


@dataclass(frozen=True)
class OpSpec:
    """What the runner has to know of an op.

    Attributes:
        build: inputs of a case on a device.
        reference: plain PyTorch, from tensors to output(s).
        work: by mode.
        products: (rows, hidden, vocabulary) of the head's matrix product, which set the floor; None: memory does.
        row_truth: for ops at the LM head, from a chunk's logits in high precision, the inputs and the chunk's rows to
            (per-row outputs or None, the scalar whose gradient is wanted); so that the truth needs no `[N, V]` logits.
    """

    build: Callable[[Case, torch.device], Inputs]
    reference: Callable[[Tensors], Outputs]
    work: Callable[[Case], dict[str, Work]]
    products: Callable[[Case], tuple[int, int, int]] | None = None
    row_truth: Callable[[Tensor, Inputs, Tensor], tuple[Tensor | None, Tensor]] | None = None


def _randn(case: Case, device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(case.torch_dtype)


def _itemsize(case: Case) -> int:
    return case.torch_dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# LM head
# ---------------------------------------------------------------------------------------------------------------------


def _head_weight(case: Case, device: torch.device) -> Tensor:
    # Logits of a standard deviation near one.
    return _randn(case, device, case.sizes["V"], case.sizes["H"], scale=case.sizes["H"] ** -0.5)


def _head_products(case: Case) -> tuple[int, int, int]:
    s = case.sizes
    return s["BT"], s["H"], s["V"]


def _grpo_products(case: Case) -> tuple[int, int, int]:
    s = case.sizes
    return int(_grpo_lengths(s["B"], s["T"]).sum()), s["H"], s["V"]


def _head_work(products: Callable[[Case], tuple[int, int, int]]) -> Callable[[Case], dict[str, Work]]:
    def work(case: Case) -> dict[str, Work]:
        rows, hidden, vocab = products(case)
        one = 2.0 * rows * hidden * vocab
        return {"forward": Work(one), "backward": Work(2 * one), "both": Work(3 * one)}

    return work


def _build_cross_entropy(case: Case, device: torch.device) -> Inputs:
    s = case.sizes
    x = _randn(case, device, s["BT"], s["H"])
    target = torch.randint(s["V"], (s["BT"],), device=device)
    return Inputs({"x": x, "weight": _head_weight(case, device), "target": target}, ("x", "weight"))


def _cross_entropy_reference(t: Tensors) -> Outputs:
    return ops.linear_cross_entropy_reference(t["x"], t["weight"], t["target"])


def _cross_entropy_rows(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    target = inputs.tensors["target"]
    return None, F.cross_entropy(logits, target[rows], reduction="sum") / target.numel()


def _build_logprob(case: Case, device: torch.device) -> Inputs:
    inputs = _build_cross_entropy(case, device)
    inputs.tensors["ids"] = inputs.tensors.pop("target")
    inputs.grads = (torch.randn(case.sizes["BT"], device=device) / case.sizes["BT"],)
    return inputs


def _logprob_reference(t: Tensors) -> Outputs:
    return _log_prob_eager(t["x"], t["weight"], t["ids"])


def _logprob_rows(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    log_prob = -F.cross_entropy(logits, inputs.tensors["ids"][rows], reduction="none")
    return log_prob.detach(), (log_prob * inputs.grads[0][rows]).sum()


def _grpo_lengths(batch: int, length: int) -> Tensor:
    """Completions of 60% to 100% of the length, 80% on average."""
    return (torch.linspace(0.6, 1.0, batch, dtype=torch.float64) * length).round().long()


def _build_grpo(case: Case, device: torch.device) -> Inputs:
    s = case.sizes
    shape = (s["B"], s["T"])
    x = _randn(case, device, *shape, s["H"])
    weight = _head_weight(case, device)
    ids = torch.randint(s["V"], shape, device=device)
    mask = torch.arange(s["T"], device=device) < _grpo_lengths(*shape).to(device).unsqueeze(1)
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
    """What a trainer without a fused head computes. Not the ops' own references, which form every statistic whether it
    is asked for or not: measured as a baseline they would flatter everybody else."""
    logits = F.linear(x, weight).float()
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def grpo_terms(log_prob: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """Loss of each token: clipped policy gradient plus the KL penalty (TRL's formula, token level)."""
    ratio = torch.exp(log_prob - old)
    clipped = torch.clamp(ratio, 1 - GRPO_EPSILON, 1 + GRPO_EPSILON)
    policy = -torch.min(ratio * advantages, clipped * advantages)
    return policy + GRPO_BETA * (torch.exp(ref - log_prob) - (ref - log_prob) - 1)


def grpo_tokens(t: Tensors) -> tuple[Tensor, ...]:
    """(mask, x, ids, old, ref, advantages) of the unmasked tokens alone."""
    mask = t["mask"]
    advantages = t["advantages"].unsqueeze(1).expand(mask.shape)
    return mask, t["x"][mask], t["ids"][mask], t["old"][mask], t["ref"][mask], advantages[mask]


def _grpo_reference(t: Tensors) -> Outputs:
    log_prob = _log_prob_eager(t["x"], t["weight"], t["ids"])
    terms = grpo_terms(log_prob, t["old"], t["ref"], t["advantages"].unsqueeze(1))
    return (terms * t["mask"]).sum() / t["mask"].sum()


def _grpo_rows(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    t = inputs.tensors
    log_prob = -F.cross_entropy(logits, t["ids"].flatten()[rows], reduction="none")
    advantages = t["advantages"].unsqueeze(1).expand_as(t["mask"]).flatten()[rows]
    terms = grpo_terms(log_prob, t["old"].flatten()[rows], t["ref"].flatten()[rows], advantages)
    return None, (terms * t["mask"].flatten()[rows]).sum() / t["mask"].sum()


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise ops
# ---------------------------------------------------------------------------------------------------------------------


def _passes(
    per_mode: tuple[int, int], elements: Callable[[Mapping[str, int]], int]
) -> Callable[[Case], dict[str, Work]]:
    """Work of an op that passes over tensors of so many elements, forward and backward."""

    def work(case: Case) -> dict[str, Work]:
        size = float(elements(case.sizes) * _itemsize(case))
        forward, backward = per_mode[0] * size, per_mode[1] * size
        return {
            "forward": Work(bytes=forward),
            "backward": Work(bytes=backward),
            "both": Work(bytes=forward + backward),
        }

    return work


def _build_norm(case: Case, device: torch.device) -> Inputs:
    shape = case.sizes["N"], case.sizes["H"]
    weight = (1 + 0.1 * torch.randn(shape[1], device=device)).to(case.torch_dtype)
    tensors = {"x": _randn(case, device, *shape), "weight": weight}
    return Inputs(tensors, ("x", "weight"), (_randn(case, device, *shape),))


def _norm_reference(t: Tensors) -> Outputs:
    return ops.rms_norm_reference(t["x"], t["weight"], EPS)


def _build_add_norm(case: Case, device: torch.device) -> Inputs:
    inputs = _build_norm(case, device)
    shape = case.sizes["N"], case.sizes["H"]
    inputs.tensors["residual"] = _randn(case, device, *shape)
    inputs.leaves = ("x", "residual", "weight")
    inputs.grads = (*inputs.grads, _randn(case, device, *shape))
    return inputs


def _add_norm_reference(t: Tensors) -> Outputs:
    return ops.add_rms_norm_reference(t["x"], t["residual"], t["weight"], EPS)


def _build_embedding(case: Case, device: torch.device) -> Inputs:
    s = case.sizes
    ids = torch.randint(s["V"], (s["N"],), device=device)
    tensors = {"weight": _randn(case, device, s["V"], s["D"]), "ids": ids}
    return Inputs(tensors, ("weight",), (_randn(case, device, s["N"], s["D"]),))


def _embedding_reference(t: Tensors) -> Outputs:
    return ops.embedding_reference(t["ids"], t["weight"])


def _embedding_work(case: Case) -> dict[str, Work]:
    s = case.sizes
    rows, weight = float(s["N"] * s["D"] * _itemsize(case)), float(s["V"] * s["D"] * _itemsize(case))
    forward, backward = 2 * rows, rows + weight
    return {"forward": Work(bytes=forward), "backward": Work(bytes=backward), "both": Work(bytes=forward + backward)}


def _build_swiglu(case: Case, device: torch.device) -> Inputs:
    shape = case.sizes["N"], case.sizes["I"]
    tensors = {"gate": _randn(case, device, *shape), "up": _randn(case, device, *shape)}
    return Inputs(tensors, ("gate", "up"), (_randn(case, device, *shape),))


def _swiglu_reference(t: Tensors) -> Outputs:
    return ops.swiglu_reference(t["gate"], t["up"])


def _build_rope(case: Case, device: torch.device) -> Inputs:
    s = case.sizes

    def heads(count: int) -> Tensor:
        # As attention has them: [B, S, heads, D] in memory, seen as [B, heads, S, D].
        return _randn(case, device, 1, s["S"], count, s["D"]).transpose(1, 2)

    frequency = 1.0 / 500000.0 ** (torch.arange(0, s["D"], 2, device=device) / s["D"])
    angle = torch.arange(s["S"], device=device).unsqueeze(1) * frequency
    angle = torch.cat((angle, angle), -1).unsqueeze(0)
    tensors = {
        "q": heads(s["Q"]),
        "k": heads(s["K"]),
        "cos": angle.cos().to(case.torch_dtype),
        "sin": angle.sin().to(case.torch_dtype),
    }
    return Inputs(tensors, ("q", "k"), (heads(s["Q"]), heads(s["K"])))


def _rope_reference(t: Tensors) -> Outputs:
    return ops.rope_reference(t["q"], t["k"], t["cos"], t["sin"])


OPS: dict[str, OpSpec] = {
    "linear_cross_entropy": OpSpec(
        _build_cross_entropy, _cross_entropy_reference, _head_work(_head_products), _head_products, _cross_entropy_rows
    ),
    "fused_linear_grpo_loss": OpSpec(
        _build_grpo, _grpo_reference, _head_work(_grpo_products), _grpo_products, _grpo_rows
    ),
    "linear_logprob": OpSpec(
        _build_logprob, _logprob_reference, _head_work(_head_products), _head_products, _logprob_rows
    ),
    # Forward reads x and writes y; backward reads x and dy and writes dx.
    "rms_norm": OpSpec(_build_norm, _norm_reference, _passes((2, 3), lambda s: s["N"] * s["H"])),
    # Forward reads x and residual, writes y and S; backward reads S, dy and dS, writes one gradient for both.
    "add_rms_norm": OpSpec(_build_add_norm, _add_norm_reference, _passes((4, 4), lambda s: s["N"] * s["H"])),
    # Backward writes the whole weight gradient.
    "embedding": OpSpec(_build_embedding, _embedding_reference, _embedding_work),
    # Forward reads gate and up, writes one; backward reads both and dy, writes two.
    "swiglu": OpSpec(_build_swiglu, _swiglu_reference, _passes((3, 5), lambda s: s["N"] * s["I"])),
    "rope": OpSpec(_build_rope, _rope_reference, _passes((2, 2), lambda s: s["S"] * (s["Q"] + s["K"]) * s["D"])),
}


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def _accelerator_cases() -> list[Case]:
    rows = [Case("linear_cross_entropy", {"BT": bt, "H": 4096, "V": 128256}) for bt in (4096, 8192, 16384)]
    rows += [Case("fused_linear_grpo_loss", {"B": 8, "T": t, "H": 2048, "V": 151936}) for t in (1024, 4096)]
    rows += [Case("rms_norm", {"N": n, "H": h}) for n, h in ((8192, 4096), (16384, 8192))]
    rows += [Case("add_rms_norm", {"N": 8192, "H": 4096}), Case("embedding", {"N": 16384, "V": 151936, "D": 4096})]
    rows += [Case("swiglu", {"N": 8192, "I": 14336}), Case("rope", {"S": 8192, "Q": 32, "K": 8, "D": 128})]
    rows += [Case("linear_logprob", {"BT": 8192, "H": 4096, "V": 128256})]
    return rows


def _cpu_cases() -> list[Case]:
    """Shapes of the models in `examples/`: what a laptop runs."""
    rows = [
        Case("linear_cross_entropy", {"BT": 2048, "H": 160, "V": 8009}),
        Case("linear_cross_entropy", {"BT": 512, "H": 128, "V": 258}),
        Case("fused_linear_grpo_loss", {"B": 128, "T": 4, "H": 128, "V": 258}),
        Case("fused_linear_grpo_loss", {"B": 8, "T": 128, "H": 160, "V": 8009}),
        Case("rms_norm", {"N": 2048, "H": 160}),
        Case("rms_norm", {"N": 4096, "H": 1024}),
        Case("add_rms_norm", {"N": 2048, "H": 160}),
        Case("embedding", {"N": 2048, "V": 8009, "D": 160}),
        Case("swiglu", {"N": 2048, "I": 432}),
        Case("rope", {"S": 2048, "Q": 5, "K": 5, "D": 32}),
        Case("linear_logprob", {"BT": 2048, "H": 160, "V": 8009}),
    ]
    return [Case(c.op, c.sizes, "float32") for c in rows]


def _scaling(bts: tuple[int, ...], vocabs: tuple[int, ...], hiddens: tuple[int, ...], base: Mapping[str, int],
             dtype: str) -> list[Case]:  # fmt: skip
    def curve(op: str, axis: str, values: tuple[int, ...], fixed: Mapping[str, int]) -> list[Case]:
        return [Case(op, {**fixed, axis: v}, dtype, f"scaling-{axis}", ("both",)) for v in values]

    rows = curve("linear_cross_entropy", "BT", bts, base)
    rows += curve("linear_cross_entropy", "V", vocabs, base)
    rows += curve("linear_cross_entropy", "H", hiddens, base)
    rows += curve("rms_norm", "H", hiddens, {"N": base["BT"], "H": 0})
    return rows


def table(kind: str) -> list[Case]:
    """Every row for a kind of device, the most wanted first.

    Args:
        kind: `"npu"`, `"cuda"` or `"cpu"`.
    """
    if kind == "cpu":
        sizes = {"BT": 512, "H": 128, "V": 2048}
        return _cpu_cases() + _scaling((256, 1024, 4096), (1024, 4096, 16384), (64, 256, 1024), sizes, "float32")
    sizes = {"BT": 8192, "H": 2048, "V": 128256}
    powers = tuple(1024 << i for i in range(7))
    return _accelerator_cases() + _scaling(
        powers, (32768, 65536, 131072, 262144), (1024, 2048, 4096, 8192, 16384), sizes, "bfloat16"
    )
