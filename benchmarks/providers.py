"""The implementations that are compared. A provider imports its package and returns an op as a function of tensors.

If its package cannot be imported, it raises `ImportError` or `AttributeError`, and the results list it as absent. Every
peer runs with the settings that its documentation recommends; if two settings are useful (fast or accurate, tuned at
first use or not), there are two providers.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_trainer_kernels import backends, ops
from npu_trainer_kernels.descriptions import (
    DIVERGENCE_BETAS,
    EPS,
    GRPO_BETA,
    GRPO_EPSILON,
    Outputs,
    Tensors,
    grpo_terms,
)
from npu_trainer_kernels.descriptions import FORMS as WORKLOADS
from npu_trainer_kernels.evidence.table import TABLE

from .cases import OPS, OpCase, grpo_tokens

__all__ = ["Absent", "Provider", "providers"]

Function = Callable[[Tensors], Outputs]
Make = Callable[[OpCase, torch.device], Function]
# Rows of logits that exist at once in the low-memory setting of linear cross-entropy.
LOW_MEMORY_ROWS = 2048
# Memory of Liger's logits / memory of x: 0.5 and 1 GiB for 8192 and 16384 rows of 4096 columns, less than ours need.
LIGER_WIDE = 8
# The maximum number of rows that Liger's chunked losses compute at once.
LIGER_ROWS = 2048
# torch.compile chooses tiles and matrix products by timing them. CUDA graphs are off, as they would keep outputs alive.
TUNED_MODE = "max-autotune-no-cudagraphs"


class Absent(RuntimeError):
    """A provider's package or backend is not available."""


@dataclass(frozen=True)
class Provider:
    """A name and the function that makes the op; `package` is the distribution whose version belongs to a result. If
    `whole` is False, it computes only a part of the op, for comparison of times, and its results are not checked."""

    name: str
    make: Make
    package: str
    in_scaling: bool = True
    whole: bool = True


_PEERS: dict[str, list[Provider]] = {op: [] for op in OPS}


def _peer(op: str, name: str, package: str, in_scaling: bool = False, whole: bool = True) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        _PEERS[op].append(Provider(name, make, package, in_scaling, whole))
        return make

    return register


def _ours(op: str, backend: str) -> Provider:
    def make(case: OpCase, device: torch.device) -> Function:
        reason = backends.unavailable(backend, device.type, case.backend_op)
        if reason is not None:
            raise Absent(f"backend {backend!r}: {reason}")
        return WORKLOADS[op].ours(backend)

    return Provider(f"ours-{backend}", make, "npu_trainer_kernels")


@_peer("linear_cross_entropy", "ours-low-memory", "npu_trainer_kernels", in_scaling=True)
def _low_memory(case: OpCase, device: torch.device) -> Function:
    return lambda t: ops.fused_linear_cross_entropy(  # type: ignore[return-value]
        t["x"], t["weight"], t["target"], low_memory=True,
        chunk_rows=min(LOW_MEMORY_ROWS, max(1, t["x"].shape[0] // 2)),
    )  # fmt: skip


@_peer("fused_linear_grpo_loss", "ours-logprob", "npu_trainer_kernels")
def _logprob_and_formula(case: OpCase, device: torch.device) -> Function:
    """Computes the loss as TRL's trainer does with our head in place of its own."""

    def call(t: Tensors) -> Outputs:
        _, x, ids, old, ref, advantages = grpo_tokens(t)
        return grpo_terms(ops.linear_logprob(x, t["weight"], ids).log_prob, old, ref, advantages).mean()

    return call


def _reference(op: str) -> Provider:
    return Provider("reference", lambda case, device: OPS[op].reference, "torch")


def _compiled(op: str, mode: str | None = None) -> Provider:
    def make(case: OpCase, device: torch.device) -> Function:
        torch._dynamo.reset()
        return torch.compile(OPS[op].reference, dynamic=False, mode=mode)

    if mode is None:
        return Provider("torch.compile", make, "torch")
    return Provider(f"torch.compile-{mode}", make, "torch", in_scaling=False)


# ---------------------------------------------------------------------------------------------------------------------
# torch.nn.functional
# ---------------------------------------------------------------------------------------------------------------------


def _functional_cross_entropy(policy: str) -> Make:
    """PyTorch's chunked head, with one of its policies of where sums are kept in fp32."""

    def make(case: OpCase, device: torch.device) -> Function:
        if not hasattr(F, "linear_cross_entropy"):
            raise Absent(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
        options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)  # type: ignore[arg-type, attr-defined, unused-ignore]
        return lambda t: F.linear_cross_entropy(t["x"], t["weight"], t["target"], options=options)  # type: ignore[attr-defined, unused-ignore]

    return make


# "auto" is the policy that PyTorch measured to be best for a device and a dtype.
for _policy, _suffix in (("auto", ""), ("accurate", "-accurate"), ("balanced", "-balanced"), ("compact", "-compact")):
    _peer("linear_cross_entropy", "torch.nn.functional" + _suffix, "torch")(_functional_cross_entropy(_policy))


@_peer("rms_norm", "torch.nn.functional", "torch")
def _functional_norm(case: OpCase, device: torch.device) -> Function:
    return lambda t: F.rms_norm(t["x"], t["weight"].shape, t["weight"], EPS)


@_peer("layer_norm", "torch.nn.functional", "torch")
def _functional_layer_norm(case: OpCase, device: torch.device) -> Function:
    return lambda t: F.layer_norm(t["x"], t["weight"].shape, t["weight"], None, EPS)


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts
# ---------------------------------------------------------------------------------------------------------------------


@_peer("moe_experts", "transformers-grouped_mm", "transformers")
def _stock_experts(case: OpCase, device: torch.device) -> Function:
    """Makes the default implementation of transformers' models, which needs no class."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    def apply_gate(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def call(t: Tensors) -> Outputs:
        layer: Any = SimpleNamespace(
            num_experts=case.sizes["E"], gate_up_proj=t["gate_up_weight"], down_proj=t["down_weight"],
            _apply_gate=apply_gate, has_gate=True, has_bias=False, is_transposed=False, _is_expert_parallel=False,
            has_post_expert_norm=False,
        )  # fmt: skip
        return grouped_mm_experts_forward(layer, t["x"], t["ids"], t["probabilities"])

    return call


class _ProductsAlone(torch.autograd.Function):
    """The two matrix products of experts and the four of their backward, on rows that are already sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, rows: Tensor, gated: Tensor, ends: Tensor) -> Tensor:
        product = torch.nn.functional.grouped_mm  # type: ignore[attr-defined, unused-ignore]
        h = product(rows, up.transpose(1, 2), offs=ends)
        y = product(gated, down.transpose(1, 2), offs=ends)
        ctx.save_for_backward(up, down, rows, gated, h, y, ends)
        ctx.tokens = x.shape[0]
        return y[: ctx.tokens]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        product = torch.nn.functional.grouped_mm  # type: ignore[attr-defined, unused-ignore]
        up, down, rows, gated, dh, dy, ends = ctx.saved_tensors
        product(dy, down, offs=ends)
        d_down = product(dy.t(), gated, offs=ends)
        dx = product(dh, up, offs=ends)
        return dx[: ctx.tokens], product(dh.t(), rows, offs=ends), d_down, None, None, None


@_peer("moe_experts", "grouped-products-alone", "torch", whole=False)
def _products_alone(case: OpCase, device: torch.device) -> Function:
    if not hasattr(F, "grouped_mm"):
        raise Absent(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    placed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def call(t: Tensors) -> Outputs:
        key = t["x"].data_ptr()
        if key not in placed:
            ids, order = t["ids"].flatten().sort()
            bounds = torch.arange(1, case.sizes["E"] + 1, device=device)
            ends = torch.searchsorted(ids, bounds, out_int32=True)
            rows = t["x"].detach()[order // case.sizes["k"]]
            placed[key] = rows, rows.new_empty(len(rows), case.sizes["I"]).normal_(), ends
        return _ProductsAlone.apply(t["x"], t["gate_up_weight"], t["down_weight"], *placed[key])

    return call


# ---------------------------------------------------------------------------------------------------------------------
# Liger-Kernel
# ---------------------------------------------------------------------------------------------------------------------


def _liger_cross_entropy(**settings: Any) -> Function:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda t: liger_fused_linear_cross_entropy(t["x"], t["weight"], t["target"], **settings)


@_peer("linear_cross_entropy", "liger", "liger-kernel", in_scaling=True)
def _liger_default(case: OpCase, device: torch.device) -> Function:
    return _liger_cross_entropy()


@_peer("linear_cross_entropy", "liger-wide", "liger-kernel")
def _liger_wide(case: OpCase, device: torch.device) -> Function:
    # By default its chunks are short, to save memory: 128 to 512 rows at V=128256, H=4096.
    return _liger_cross_entropy(chunk_mem_const=LIGER_WIDE)


@_peer("linear_cross_entropy", "liger-fp32-accum", "liger-kernel")
def _liger_fp32(case: OpCase, device: torch.device) -> Function:
    return _liger_cross_entropy(accum_dtype=torch.float32)


def _liger_jsd(case: OpCase, **settings: Any) -> Function:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    if unknown := settings.keys() - inspect.signature(LigerFusedLinearJSD).parameters.keys():
        raise Absent(f"this Liger's fused divergence has no {', '.join(sorted(unknown))}")
    loss = LigerFusedLinearJSD(jsd_beta=DIVERGENCE_BETAS[case.op], **settings)
    return lambda t: loss(t["x"], t["weight"], t["teacher_x"], t["teacher_weight"], None)


@_peer("linear_divergence", "liger", "liger-kernel")
@_peer("linear_divergence_kl", "liger", "liger-kernel")
def _liger_divergence(case: OpCase, device: torch.device) -> Function:
    return _liger_jsd(case)


@_peer("linear_divergence", "liger-fp32-accum", "liger-kernel")
@_peer("linear_divergence_kl", "liger-fp32-accum", "liger-kernel")
def _liger_divergence_fp32(case: OpCase, device: torch.device) -> Function:
    return _liger_jsd(case, accum_dtype=torch.float32)


@_peer("linear_divergence", "liger-chunked", "liger-kernel")
@_peer("linear_divergence_kl", "liger-chunked", "liger-kernel")
def _liger_divergence_chunked(case: OpCase, device: torch.device) -> Function:
    """Its distillation loss that torch.compile compiles chunk by chunk, without the part that needs targets."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    torch._dynamo.reset()
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=DIVERGENCE_BETAS[case.op], chunk_size=LIGER_ROWS
    )
    targets = torch.zeros(case.sizes["BT"], dtype=torch.int64, device=device)
    return lambda t: loss(t["x"], t["weight"], t["teacher_x"], t["teacher_weight"], targets)


@_peer("rms_norm", "liger", "liger-kernel", in_scaling=True)
def _liger_norm(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda t: liger_rms_norm(t["x"], t["weight"], EPS)


@_peer("add_rms_norm", "liger", "liger-kernel")
def _liger_add_norm(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda t: liger_fused_add_rms_norm(t["x"], t["residual"], t["weight"], EPS)


@_peer("layer_norm", "liger", "liger-kernel")
def _liger_layer_norm(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.functional import liger_layer_norm

    # It has no layer norm without a bias; a frozen bias of zeros is the closest.
    bias = torch.zeros(case.sizes["H"], dtype=case.torch_dtype, device=device)
    return lambda t: liger_layer_norm(t["x"], t["weight"], bias, EPS)


@_peer("embedding", "liger", "liger-kernel")
def _liger_embedding(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.experimental.embedding import LigerEmbeddingFunction

    return lambda t: LigerEmbeddingFunction.apply(t["weight"], t["ids"])


@_peer("swiglu", "liger", "liger-kernel")
def _liger_swiglu(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.functional import liger_swiglu

    return lambda t: liger_swiglu(t["gate"], t["up"])


@_peer("moe_experts", "liger", "liger-kernel")
def _liger_experts(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda t: LigerFusedMoEFunction.apply(
        t["x"], t["gate_up_weight"], t["down_weight"], t["ids"].int(), t["probabilities"]
    )


@_peer("geglu", "liger", "liger-kernel")
def _liger_geglu(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.functional import liger_geglu

    return lambda t: liger_geglu(t["gate"], t["up"])


@_peer("rope", "liger", "liger-kernel")
def _liger_rope(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.functional import liger_rope

    return lambda t: liger_rope(t["q"], t["k"], t["cos"], t["sin"])


def _liger_chunked(case: OpCase, **settings: Any) -> Function:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    # Its default is one sequence per chunk, even if it is short.
    chunk = max(1, LIGER_ROWS // case.sizes["T"])
    loss = LigerFusedLinearGRPOLoss(
        beta=GRPO_BETA, epsilon_low=GRPO_EPSILON, epsilon_high=GRPO_EPSILON, loss_type="bnpo", use_ref_model=True,
        chunk_size=chunk, **settings,
    )  # fmt: skip

    def call(t: Tensors) -> Outputs:
        result = loss(
            t["x"], t["weight"], t["ids"], t["mask"].int(), t["advantages"],
            ref_per_token_logps=t["ref"], old_per_token_logps=t["old"],
        )  # fmt: skip
        return result[0]

    return call


@_peer("fused_linear_grpo_loss", "liger-chunked", "liger-kernel")
def _liger_chunked_grpo(case: OpCase, device: torch.device) -> Function:
    return _liger_chunked(case)


@_peer("fused_linear_grpo_loss", "liger-chunked-eager", "liger-kernel")
def _liger_eager_grpo(case: OpCase, device: torch.device) -> Function:
    # Its loss is compiled by default, which fails at some shapes; its matrix products are never compiled.
    return _liger_chunked(case, compiled=False)


@_peer("fused_linear_grpo_loss", "liger-triton", "liger-kernel")
def _liger_triton_grpo(case: OpCase, device: torch.device) -> Function:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def call(t: Tensors) -> Outputs:
        # It needs the logits of one position more than there are completion tokens.
        logits = F.linear(F.pad(t["x"], (0, 0, 0, 1)), t["weight"])
        loss, _ = triton_grpo_loss(
            logits, t["old"], t["ref"], t["ids"], t["advantages"], t["mask"].int(), temperature=1.0, beta=GRPO_BETA,
            eps_low=GRPO_EPSILON, eps_high=GRPO_EPSILON, loss_type="bnpo", reduce=True,
        )  # fmt: skip
        return loss

    return call


# ---------------------------------------------------------------------------------------------------------------------
# TRL and cut-cross-entropy
# ---------------------------------------------------------------------------------------------------------------------


def _trl_log_prob() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from trl.trainer import utils

    function = getattr(utils, "_ChunkedLogProbFunction", None)
    if function is None:
        raise Absent("this TRL has no fused head here (1.15 and later have, with Triton)")
    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return lambda x, weight, ids: function.apply(x, weight, None, ids, 1.0, chunk, None, 1.0, ("log_probs",))[0]


@_peer("linear_cross_entropy", "trl", "trl", in_scaling=True)
def _trl_cross_entropy(case: OpCase, device: torch.device) -> Function:
    log_prob = _trl_log_prob()
    return lambda t: -log_prob(t["x"], t["weight"], t["target"]).mean()


@_peer("linear_logprob", "trl", "trl")
def _trl_logprob(case: OpCase, device: torch.device) -> Function:
    log_prob = _trl_log_prob()
    return lambda t: log_prob(t["x"], t["weight"], t["ids"])


@_peer("linear_divergence", "trl", "trl")
@_peer("linear_divergence_kl", "trl", "trl")
def _trl_divergence(case: OpCase, device: torch.device) -> Function:
    from trl.trainer import distillation_trainer

    # TRL's chunked divergence, with the loss of its DistillationTrainer.
    loss = getattr(distillation_trainer, "_chunked_divergence_loss", None)
    if loss is None:
        raise Absent("this TRL has no chunked divergence here (1.16 has)")

    def call(t: Tensors) -> Outputs:
        mask = torch.ones(t["x"].shape[:1], dtype=torch.bool, device=t["x"].device)
        return loss(t["x"], t["teacher_x"], t["weight"], t["teacher_weight"], mask, DIVERGENCE_BETAS[case.op])[0]

    return call


@_peer("fused_linear_grpo_loss", "trl", "trl")
def _trl_grpo(case: OpCase, device: torch.device) -> Function:
    log_prob = _trl_log_prob()

    def call(t: Tensors) -> Outputs:
        _, x, ids, old, ref, advantages = grpo_tokens(t)
        return grpo_terms(log_prob(x, t["weight"], ids), old, ref, advantages).mean()

    return call


def _imported_with(package: str, **environment: str) -> ModuleType:
    """Imports a second copy of a package that reads its settings from the environment at import."""
    importlib.import_module(package)  # so that its dependencies are not imported twice
    others = {name: m for name, m in sys.modules.items() if name.partition(".")[0] != package}
    with mock.patch.dict(os.environ, environment), mock.patch.dict(sys.modules, others, clear=True):
        return importlib.import_module(package)


def _cut_cross_entropy(**settings: Any) -> Function:
    from cut_cross_entropy import linear_cross_entropy

    return lambda t: linear_cross_entropy(t["x"], t["weight"], t["target"], **settings)


@_peer("linear_cross_entropy", "cut-cross-entropy", "cut-cross-entropy")
def _cut_default(case: OpCase, device: torch.device) -> Function:
    # Its filter keeps the default: that of 25.1.1, "high", is the same number as "auto", and a later release may choose
    # a better one.
    return _cut_cross_entropy()


@_peer("linear_cross_entropy", "cut-cross-entropy-tuned", "cut-cross-entropy")
def _cut_tuned(case: OpCase, device: torch.device) -> Function:
    # Its tiles are fixed unless tuning is requested.
    tuned = _imported_with("cut_cross_entropy", CCE_AUTOTUNE="1")
    return lambda t: tuned.linear_cross_entropy(t["x"], t["weight"], t["target"])


@_peer("linear_cross_entropy", "cut-cross-entropy-unfiltered", "cut-cross-entropy")
def _cut_unfiltered(case: OpCase, device: torch.device) -> Function:
    return _cut_cross_entropy(filter_eps=None)


def providers(case: OpCase) -> list[Provider]:
    """Returns the providers of a row: ours first, then the reference, then the peers."""
    peers = sorted(_PEERS[case.op], key=lambda p: not p.name.startswith("ours"))
    ours = [_ours(case.op, name) for name in ("triton", "torch")]
    if TABLE[case.backend_op].vendor is not None:
        ours.append(_ours(case.op, "vendor"))
    extra = [p for p in peers if p.name.startswith("ours")]
    compiled = [_compiled(case.op), _compiled(case.op, TUNED_MODE)]
    everyone = [*ours, *extra, _reference(case.op), *compiled, *peers[len(extra) :]]
    return [p for p in everyone if case.group == "ops" or p.in_scaling]
