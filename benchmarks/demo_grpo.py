"""Times the GRPO demo's training without and with the kernels, to see whether they are slower with a tiny vocabulary.

    python -m benchmarks.demo_grpo --output benchmarks/results/NAME.json

`make demo` runs each variant once. Here the variants alternate in one process, from the same warmed-up model and seed.
Rows have wall-clock seconds and processor seconds, which other load disturbs less.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trl
from transformers import Qwen3ForCausalLM, set_seed

from npu_trainer_kernels import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import grpo
from _common import byte_level_tokenizer

TRAINERS = {"plain": trl.GRPOTrainer, "flag": GRPOTrainer}


def measure(runs: int, steps: int) -> list[dict[str, Any]]:
    """Returns one row per run: the variant, wall-clock seconds, processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--output_dir", folder, "--max_steps", str(steps), "--disable_tqdm", "True", "--use_cpu", "True"]
        args, _, training = grpo.make_parser().parse_args_and_config(options)
        set_seed(training.seed)
        rows, _ = grpo.load_prompts(args, training.seed)
        tokenizer = byte_level_tokenizer()
        warm = Qwen3ForCausalLM(grpo.small_qwen3(tokenizer))
        grpo.warm_up(warm, tokenizer, rows, args, training)
        found = []
        # The first pair is not recorded, since it includes one-time work of the process.
        for run in range(-1, runs):
            for variant, cls in TRAINERS.items():
                _, _, training = grpo.make_parser().parse_args_and_config(options)
                set_seed(training.seed)
                model = Qwen3ForCausalLM(warm.config)
                model.load_state_dict(warm.state_dict())
                trainer = cls(
                    model=model,
                    reward_funcs=[grpo.exact_match, grpo.format_reward(tokenizer.eos_token_id)],
                    args=training,
                    train_dataset=rows,
                    processing_class=tokenizer,
                )
                wall, cpu = time.perf_counter(), time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    trainer.train()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if run >= 0:
                    found.append({"variant": variant, "run": run, "seconds": wall, "cpu_seconds": cpu})
    return found


def ratios(rows: list[dict[str, Any]], of: str) -> dict[str, float]:
    """Returns flag / plain for the medians, and for the minima, which other load has disturbed least."""
    taken = {variant: [row[of] for row in rows if row["variant"] == variant] for variant in TRAINERS}
    return {fn.__name__: fn(taken["flag"]) / fn(taken["plain"]) for fn in (median, min)}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_grpo", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=6, help="of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="per run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    rows = measure(args.runs, args.steps)
    result = {
        "command": f"python -m benchmarks.demo_grpo --runs {args.runs} --steps {args.steps} --threads {args.threads}",
        "machine": platform.machine(), "cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()[0],
        "torch": torch.__version__, "trl": trl.__version__,
        "ratios": {of: ratios(rows, of) for of in ("seconds", "cpu_seconds")}, "rows": rows,
    }  # fmt: skip
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["ratios"]))


if __name__ == "__main__":
    main()
