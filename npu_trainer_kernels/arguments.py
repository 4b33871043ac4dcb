"""The fields behind `--use_npu_kernels`, for `HfArgumentParser` and `TrlParser` (command line and YAML)."""

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args

from .options import MODEL_OPS, check_capture, check_ops, check_report, check_tiled_mlp, parse_override
from .support.switch import audit_steps, check_switch, switch

if TYPE_CHECKING:
    from .callback import NpuKernelsCallback

__all__ = ["NpuKernelsArguments"]


@dataclass
class NpuKernelsArguments:
    """Arguments that put the fused kernels into a training script."""

    use_npu_kernels: bool = field(
        default=False, metadata={"help": "Train with the fused kernels, on whatever device the run uses."}
    )
    npu_kernels_ops: list[str] | None = field(
        default=None,
        metadata={"help": f"Which ops to use, of {', '.join(MODEL_OPS)}; all that are worth it by default."},
    )
    npu_kernels_backend: str | None = field(
        default=None,
        metadata={"help": "Overrides the choice of backend: 'torch', or 'rms_norm=torch,linear_logprob=triton'."},
    )

    npu_kernels_strict: bool = field(
        default=False,
        metadata={"help": "Stop when a kernel cannot be compiled or launched; otherwise torch takes over for its op."},
    )

    npu_kernels_tiled_mlp: int = field(
        default=0,
        metadata={
            "help": "Gated MLPs compute at most so many tokens at once (8192, say), for less memory in long sequences; "
            "0: all tokens."
        },
    )

    npu_kernels_capture: str = field(
        default="auto",
        metadata={
            "help": "When decoder layers are captured as graphs of the device and replayed: 'auto' (on CUDA, if the "
            "device is seen to wait for Python), 'on' or 'off'."
        },
    )

    npu_kernels_warm_up: bool = field(
        default=True,
        metadata={"help": "Compile the kernels before the first step; otherwise each when it is first used."},
    )

    npu_kernels_balance: bool = field(
        default=True,
        metadata={
            "help": "In GRPO, spread rows evenly over micro-batches and ranks by their live tokens; otherwise no row "
            "changes its rank."
        },
    )

    npu_kernels_audit: str = field(
        default="first",
        metadata={
            "help": "When what is served is compared with the model's own code, on a batch of the run: 'first' (before "
            "its first step), 'off', or a number of steps after which it is again."
        },
    )

    npu_kernels_report: str = field(
        default="short",
        metadata={"help": "What is printed when training begins: 'short', or 'full' with every module and reason."},
    )

    def __post_init__(self) -> None:
        # Parsers convert values of the command line; values of a YAML file arrive as they are.
        for name in ("use_npu_kernels", "npu_kernels_strict", "npu_kernels_warm_up", "npu_kernels_balance"):
            check_switch(name, getattr(self, name))
        ops, backend = self.npu_kernels_ops, self.npu_kernels_backend
        if ops and isinstance(ops, list) and all(isinstance(op, str) for op in ops):
            # Commas are accepted, as `npu-kernels run --ops` and NPU_KERNELS_OPS accept them.
            self.npu_kernels_ops = ops = ",".join(ops).split(",")
        if ops is not None and not isinstance(ops, list):
            raise ValueError(f"npu_kernels_ops must be a list of {', '.join(MODEL_OPS)}, one at least; got {ops!r}")
        check_ops(ops, "npu_kernels_ops", "list")
        audit_steps("npu_kernels_audit", self.npu_kernels_audit)
        check_report("npu_kernels_report", self.npu_kernels_report)
        if backend is not None and not (isinstance(backend, str) and backend):
            raise ValueError(f"npu_kernels_backend must be 'torch' or 'op=backend,...'; got {backend!r}")
        check_tiled_mlp("npu_kernels_tiled_mlp", self.npu_kernels_tiled_mlp, ops)
        check_capture("npu_kernels_capture", self.npu_kernels_capture)
        given = [name for name in ("ops", "backend", "strict", "tiled_mlp") if getattr(self, f"npu_kernels_{name}")]
        given += [name for name in ("warm_up", "balance") if not getattr(self, f"npu_kernels_{name}")]
        defaults = {option.name: option.default for option in fields(self)}
        given += [name for name in ("audit", "report", "capture")
                  if getattr(self, f"npu_kernels_{name}") != defaults[f"npu_kernels_{name}"]]  # fmt: skip
        if not self.use_npu_kernels and given:
            raise ValueError(f"npu_kernels_{given[0]} does nothing without --use_npu_kernels")
        if self.npu_kernels_backend is not None:
            parse_override(self.npu_kernels_backend, "npu_kernels_backend")

    @classmethod
    def from_environment(cls) -> "NpuKernelsArguments":
        """Sets the flag, and reads the options from variables: NPU_KERNELS_OPS=rope,swiglu for `npu_kernels_ops`."""
        given: dict[str, Any] = {}
        for option in fields(cls):
            variable = option.name.upper()
            value = os.environ.get(variable, "")
            if not value or option.name == "use_npu_kernels":
                continue
            if option.type is bool:
                given[option.name] = switch(variable)
            elif option.type is int:
                # `__post_init__` refuses a value that is no number, by the option's name.
                given[option.name] = int(value) if value.isdecimal() else value
            else:
                # HfArgumentParser replaces the types of the fields that it has parsed by plainer ones.
                listed = list[str] in (option.type, *get_args(option.type))
                given[option.name] = value.split(",") if listed else value
        return cls(use_npu_kernels=True, **given)

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `NpuKernelsCallback`."""
        return {
            option.name.removeprefix("npu_kernels_"): getattr(self, option.name)
            for option in fields(self)
            if option.name != "use_npu_kernels"
        }

    def callbacks(self) -> "list[NpuKernelsCallback]":
        """Returns a Trainer's `callbacks` argument: one `NpuKernelsCallback`, or none without the flag."""
        from .callback import NpuKernelsCallback

        if not self.use_npu_kernels:
            return []
        callback = NpuKernelsCallback(**self.options())
        callback.in_full = "--npu_kernels_report full"
        return [callback]
