"""Compares the peak memory that `npu-kernels fit` predicts with the allocator's peak in real training steps.

    python -m benchmarks.fit_check --output benchmarks/results/NAME.json

Every configuration trains for a few steps in a separate process, with the real trainers, plain and with the kernels;
then the same process predicts the peak on tensors without memory. An existing file is continued. On a CPU, where no
allocator counts, the prediction's ledger counts real tensors instead: that tests this module, but proves little.

All rows have the full length, as the prediction assumes: no padding, no varying lengths, and prompts too short to be
computed once for all rows.

    python -m benchmarks.fit_check --again OLD --output NEW.json

measures nothing: it compares the peaks of an older file with current predictions for the device of that file.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .endtoend import ROOT
from .models import MODELS
from .step_cases import VARIANTS, StepWorkload
from .step_clock import Clock

__all__ = [
    "Configuration", "config_of", "configurations", "main", "measure_one", "predict_one", "run_child", "setup_of",
    "worst",
]  # fmt: skip

STEPS = 3
SECONDS = 300.0
STEPS_OF = ("plain", "flag")
TRAINER_OF = {"sft-trainer": "trainer", "sft-trl": "sft", "grpo-trl": "grpo", "dpo-trl": "dpo"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Configuration:
    """A workload without padding, and whether its layers are checkpointed in addition to the workload's options."""

    workload: StepWorkload
    checkpointing: bool = False

    @property
    def shape(self) -> str:
        return self.workload.shape + (" checkpointed" if self.checkpointing else "")


def configurations(kind: str) -> list[Configuration]:
    """Returns the configurations for a kind of device: 1B to 14B models, with SFT, GRPO, DPO, adapters and experts."""
    if kind == "cpu":
        return [
            Configuration(StepWorkload("sft-trainer", "tiny-llama", 2, 32)),
            Configuration(StepWorkload("sft-trl", "tiny-qwen3", 2, 32, lora=4), checkpointing=True),
        ]
    return [
        Configuration(StepWorkload("sft-trainer", "llama-1b", 8, 2048)),
        Configuration(StepWorkload("grpo-trl", "qwen3-0.6b", 8, 4096, 128)),
        Configuration(StepWorkload("sft-trainer", "gemma3-1b", 4, 2048)),
        Configuration(StepWorkload("sft-trl", "llama-8b", 4, 2048, lora=16), checkpointing=True),
        Configuration(StepWorkload("sft-trl", "qwen3-14b", 4, 2048, lora=16), checkpointing=True),
        Configuration(StepWorkload("sft-trainer", "qwen3-moe", 4, 2048)),
        Configuration(StepWorkload("grpo-trl", "qwen3-4b", 8, 1504, 32, lora=16)),
        Configuration(StepWorkload("dpo-trl", "llama-1b", 8, length=544, prompt=32, least=544)),
        Configuration(StepWorkload("sft-trl", "qwen3-4b", 4, 2048)),
        Configuration(StepWorkload("sft-trainer", "llama-8b", 8, 2048), checkpointing=True),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# One configuration, in a separate process
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _counted(model: Any) -> Iterator[Any]:
    """Yields a function that returns the peak bytes inside the block."""
    import torch

    from npu_trainer_kernels import device as devices
    from npu_trainer_kernels.fit._ledger import Ledger

    kind = devices.accelerator()
    if kind != "cpu":
        yield torch.get_device_module(kind).max_memory_allocated
        return
    ledger = Ledger(model.config.get_text_config().vocab_size)
    with ledger:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # so that the ledger sees the allocation
        yield lambda: ledger.peak_bytes


def measure_one(configuration: Configuration, variant: str) -> int:
    """Returns the allocator's peak bytes in a few steps of the real trainer."""
    import torch

    from npu_trainer_kernels import device as devices

    from .steps import build_trainer

    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(torch.device(devices.accelerator()))
        trainer, _ = build_trainer(configuration.workload, VARIANTS[variant], STEPS, folder, clock)
        if configuration.checkpointing:
            trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if configuration.workload.lora:
                trainer.model.enable_input_require_grads()
        with _counted(trainer.model) as peak:
            trainer.train()
            return int(peak())


def config_of(size: str) -> Any:
    """Returns the config for a key of `MODELS`."""
    import transformers

    family, arguments, _ = MODELS[size]
    return getattr(transformers, f"{family}Config")(pad_token_id=0, bos_token_id=None, eos_token_id=1, **arguments)


def setup_of(configuration: Configuration, variant: str) -> Any:
    """Returns the `Setup` for a configuration."""
    import torch

    from npu_trainer_kernels.fit import Setup

    workload, dtype = configuration.workload, MODELS[configuration.workload.size][2]
    # As `steps.py` configures TRL's GRPO trainer.
    in_16_bits = workload.name == "grpo-trl" and dtype == "bfloat16"
    return Setup(
        TRAINER_OF[workload.name], workload.batch, workload.prompt + workload.length, workload.prompt,
        getattr(torch, dtype), autocast=in_16_bits, variant="kernels" if VARIANTS[variant].is_ours else "plain",
        checkpointing=configuration.checkpointing or in_16_bits, lora=workload.lora,
    )  # fmt: skip


def predict_one(configuration: Configuration, variant: str) -> Any:
    """Returns the `Prediction` for the same steps."""
    import torch

    from npu_trainer_kernels import device as devices
    from npu_trainer_kernels.fit import predict

    config, setup = config_of(configuration.workload.size), setup_of(configuration, variant)
    kind = devices.accelerator()
    if kind == "cpu":
        return predict(config, setup, libraries=0)
    return predict(config, replace(setup, memory=devices.spec(torch.device(kind)).memory_bytes))


def run_child(configuration: Configuration, variant: str) -> Row:
    """Returns the row of a configuration that runs in a separate process, also after a failure."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [
            sys.executable, "-m", __spec__.name, "--one",
            json.dumps({**asdict(configuration), "variant": variant}), "--output", str(output),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=False)
        except subprocess.TimeoutExpired:
            return {"status": "error", "reason": f"not finished after {SECONDS:.0f} s"}
        if done.returncode != 0 or not output.exists():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {"status": "error", "reason": lines[-1][:400], "log": done.stderr[-3000:]}
        found: Row = json.loads(output.read_text(encoding="utf-8"))
        return found


def _one(given: Row, output: Path) -> int:
    variant = given["variant"]
    configuration = Configuration(StepWorkload(**given["workload"]), given["checkpointing"])
    measured = measure_one(configuration, variant)
    predicted = predict_one(configuration, variant)
    found = {
        "status": "ok", "peak_bytes": measured, "predicted_bytes": predicted.peak_bytes, "parts": predicted.parts,
        "error": predicted.peak_bytes / measured - 1,
    }  # fmt: skip
    output.write_text(json.dumps(found), encoding="utf-8")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------------------------------


def again(old: Path, new: Path, meta: Row) -> list[Row]:
    """Writes the peaks of an old file with current predictions, and returns the rows. `meta` describes the environment
    of the predictions."""
    from npu_trainer_kernels.fit import predict

    from .results import read

    measured, rows = read(old)
    memory = measured["device"]["memory_bytes"]
    known = {(c.workload.name, c.shape): c for c in configurations(measured["device"]["kind"])}
    for row in rows:
        configuration = known[row["op"], row["shape"]]
        setup = replace(setup_of(configuration, row["provider"]), memory=memory)
        found = predict(config_of(configuration.workload.size), setup)
        row["predicted_when_measured_bytes"] = row["predicted_bytes"]
        row.update(predicted_bytes=found.peak_bytes, parts=found.parts, error=found.peak_bytes / row["peak_bytes"] - 1)
    meta = {**measured, "measured_in": old.name, "predicted": meta}
    new.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return rows


def worst(rows: Sequence[Row]) -> float:
    """Returns the largest relative error of the rows that were measured."""
    return max((abs(row["error"]) for row in rows if row["status"] == "ok"), default=float("inf"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a configuration failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict anew beside the peaks of this results file")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    parser.add_argument("--one", metavar="JSON", help="a configuration and its variant, in this process")
    args = parser.parse_args(arguments)
    if args.one is not None:
        return _one(json.loads(args.one), args.output)
    import torch

    from npu_trainer_kernels import device as devices

    from .results import Results, environment, key_of, package_version

    kind = devices.accelerator()
    meta = environment(torch.device(kind), arguments, args.commit, "benchmarks.fit_check")
    if args.again is not None:
        print(f"largest error {worst(again(args.again, args.output, meta)):.2%}")
        return 0
    results = Results(args.output, meta)
    for configuration in configurations(kind):
        for variant in STEPS_OF:
            workload = configuration.workload
            row: Row = {
                "group": "fit", "op": workload.name, "shape": configuration.shape, "dtype": MODELS[workload.size][2],
                "provider": variant, "mode": "peak", "version": package_version(VARIANTS[variant].package),
            }  # fmt: skip
            if results.has(key_of(row), row["version"]):
                continue
            row.update(run_child(configuration, variant))
            results.add([row])
            text = row.get("reason", "")
            if row["status"] == "ok":
                text = (f"{row['peak_bytes'] / (1 << 30):.2f} GiB, predicted {row['predicted_bytes'] / (1 << 30):.2f} "
                        f"({row['error']:+.2%})")  # fmt: skip
            print(f"{row['op']} {row['shape']} {variant}: {text}", flush=True)
    failed = [row for row in results.rows if row["status"] != "ok"]
    print(f"largest error {worst(results.rows):.2%}; {len(failed)} of {len(results.rows)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
