"""What a description of an op is made of.

A description says of a form of an op what everything that runs the op by itself has to know: inputs at the shapes of a
model, plain PyTorch's function and the op's own, the fewest operations and bytes, and the sizes at which the Ascend
compiler is given it. Each file beside this one describes one family of ops, in `FORMS` and `GATE`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import device
from ..evidence.table import op_of
from ..support.configs import EXPERTS, SLOTS, rotated_share, setting, short_convolution

__all__ = [
    "BACKEND",
    "DTYPES",
    "EPS",
    "FORMS",
    "GATE_DTYPES",
    "GPT_OSS",
    "HEAD_DIMS",
    "HIDDEN",
    "ROWS",
    "ROW_LIMIT",
    "VOCABULARIES",
    "Call",
    "Form",
    "Function",
    "GateEntry",
    "GateTensors",
    "Inputs",
    "ModelShapes",
    "Outputs",
    "Tensors",
    "Unserved",
    "Work",
    "Workload",
    "as_tuple",
    "attention_lengths",
    "passes",
    "randn",
    "run_backward",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = 1e-6
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
        leaves: the names of tensors that need a gradient; none for an op without one.
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
        pass over memory that neither the op nor a model makes. An op without leaves has no backward.
        """
        if not self.leaves:
            return
        leaves = [self.tensors[name] for name in self.leaves]
        found = torch.autograd.grad(list(as_tuple(outputs)), leaves, list(self.grads) or None, allow_unused=True)
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient

    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors.values(), *self.grads))


_TOKENS = ("N", "S", "BT", "B", "T")
# Sizes of a batch that are not factors of its number of tokens.
_OF_BATCH = ("live", "shared")


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


@dataclass(frozen=True)
class Workload:
    """An op at one shape.

    Attributes:
        op: a key of `FORMS`.
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
        return FORMS[self.op].reference

    def inputs(self, device: torch.device) -> Inputs:
        return FORMS[self.op].build(self, device).require_grad()

    def ours(self, backend: str | None) -> Function:
        """Returns the op as a function of the inputs' tensors. With None, `backends.choose` decides the backend."""
        return FORMS[self.op].ours(backend)


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a causal language model that the ops' shapes depend on; 0 for parts that it does not have.

    Attributes:
        hidden, intermediate, vocabulary: sizes of the residual stream, of the MLP (of one expert, if there are
            experts), and of the LM head.
        heads, kv_heads, head_dim: sizes of attention.
        experts, slots: the number of experts of a layer, and the number of experts per token.
        rotated: the fraction of a head that rotates.
        channels, taps: sizes of the short convolution of layers with a state.
        state_keys, state_values: heads of keys and of values of linear attention.
        key_size, value_size: sizes of these heads.
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
    channels: int = 0
    taps: int = 0
    state_keys: int = 0
    state_values: int = 0
    key_size: int = 0
    value_size: int = 0

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

        channels, taps = short_convolution(text)
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
            channels=channels,
            taps=taps,
            state_keys=size("linear_num_key_heads"),
            state_values=size("linear_num_value_heads"),
            key_size=size("linear_key_head_dim"),
            value_size=size("linear_value_head_dim"),
        )


@dataclass(frozen=True)
class Work:
    """The least that a mode costs: operations on the matrix unit, and bytes to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Form:
    """A form of an op: the op by itself, or together with its projection.

    Attributes:
        build: makes the inputs of a workload on a device.
        reference: plain PyTorch, from tensors to outputs; it computes in fp64 if the inputs are fp64.
        ours: returns the op with a backend.
        sizes: returns the sizes of a `Workload` for a model and a number of tokens, with 0 for a part that it lacks.
        work: the least that each mode (`"forward"`, `"backward"`, `"both"`) of a workload costs; None: nobody measures
            the form.
        products: (rows, hidden, vocabulary) of the head's matrix product, which set the floor; None: `work` does.
        row_truth: for ops at the LM head, a function from a chunk's logits in high precision, the inputs and the
            chunk's rows to (per-row outputs or None, the scalar to differentiate), so that the truth needs no
            `[N, V]` logits.
    """

    build: Callable[[Workload, torch.device], Inputs]
    reference: Function
    ours: Callable[[str | None], Function]
    sizes: Callable[[ModelShapes, int], dict[str, int]]
    work: Callable[[Workload], dict[str, Work]] | None = None
    products: Callable[[Workload], tuple[int, int, int]] | None = None
    row_truth: Callable[[Tensor, Inputs, Tensor], tuple[Tensor | None, Tensor]] | None = None


FORMS: dict[str, Form] = {}
"""The forms of all ops, by name; `descriptions` fills it from its files."""


def randn(work: Workload, device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(work.torch_dtype)


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


GATE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class GateTensors:
    """Makes an op's arguments on `meta` or on the CPU.

    Attributes:
        dtype: of the floating tensors.
        where: `"meta"` or `"cpu"`.
    """

    dtype: torch.dtype
    where: str

    def floats(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = True) -> torch.Tensor:
        """Normal numbers (undefined ones on meta)."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.where)
        return (made if made.is_meta else made.normal_()).requires_grad_(grad)

    def ids(self, *shape: int, below: int) -> torch.Tensor:
        """Whole numbers in [0, below), always the same: how often one repeats decides what is moved."""
        made = torch.zeros(shape, dtype=torch.int64, device=self.where)
        return made if made.is_meta else made.random_(0, below, generator=torch.Generator().manual_seed(0))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


HIDDEN = (512, 896, 1024, 1536, 2048, 2560, 3584, 4096, 5120, 8192)
VOCABULARIES = (32000, 49152, 128256, 151936, 152064, 262144)
HEAD_DIMS = (64, 96, 128, 256)
GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
"""The options of its gate."""
ROWS = 4096
"""Tokens of a micro-batch."""
BACKEND = "ascend-lowering"
# Bytes that a kernel moves beside rows: weights, weight gradients of each core, numbers per row.
ROW_LIMIT = 1.05


# Calls an op for a number of rows at one size; returns the fewest bytes that each kernel must move, by its name.
Call = Callable[[GateTensors, int, int], Mapping[str, int]]


# Why the op leaves a size in elements of so many bytes to the model on a device, or None.
Unserved = Callable[[int, int, device.DeviceSpec], str | None]


@dataclass(frozen=True)
class GateEntry:
    """A row of the table.

    Attributes:
        op: the op's name, with the options in words.
        sizes: production values of the size that its kernels depend on.
        label: what the size is, for example `"hidden"`.
        call: forward and backward.
        rows: of the production shape.
        share: rows of one core's share; None: `rows` divided by the chip's vector cores.
        dtypes: names of `GATE_DTYPES`.
        max_traffic: the most bytes moved over the fewest possible; None: reported, not held against a limit.
        reads_values: the op's host code reads masks, so that its launches are recorded on CPU tensors, of few rows.
        follows_ids: how often its kernels' loops run is said by ids, so that a trace needs them.
        part: the share of a head that rotates; less than all is for models that rotate so much.
        unserved: the op's rule of what it leaves to the model; None: nothing.
        minima: by kernel, the fewest vector instructions per element that it can do with, counted by hand in 16-bit
            dtypes, and the instructions in words.
    """

    op: str
    sizes: tuple[int, ...]
    label: str
    call: Call
    rows: int = ROWS
    share: int | None = None
    dtypes: tuple[str, ...] = tuple(GATE_DTYPES)
    max_traffic: float | None = ROW_LIMIT
    reads_values: bool = False
    follows_ids: bool = False
    part: float = 1.0
    unserved: Unserved | None = None
    minima: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def run_backward(*outputs: torch.Tensor | None) -> None:
    """Backward with a contiguous gradient for each output, as the layers above make them."""
    given = [output for output in outputs if output is not None]
    torch.autograd.backward(given, [torch.ones_like(output) for output in given])


def passes(
    per_mode: tuple[int, int], elements: Callable[[Mapping[str, int]], int]
) -> Callable[[Workload], dict[str, Work]]:
    """Work of an op that passes over tensors of so many elements, forward and backward."""

    def work(case: Workload) -> dict[str, Work]:
        size = float(elements(case.sizes) * case.torch_dtype.itemsize)
        forward, backward = per_mode[0] * size, per_mode[1] * size
        return {
            "forward": Work(bytes=forward),
            "backward": Work(bytes=backward),
            "both": Work(bytes=forward + backward),
        }

    return work
