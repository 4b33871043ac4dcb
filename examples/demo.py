"""Trains with and without the kernels, and prints what the flag changed; `make demo` runs this.

The demo runs `sft.py` and `grpo.py` twice each from the same seed, one after the other, each in a separate process with
its own peak memory. Models, metrics and the whole output of each run stay in `--output_dir`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

HERE = Path(__file__).resolve().parent
# Patterns for a line of a trainer's log; the first that matches is shown as progress.
SHOWN = (r"'(reward)': '?(-?[\d.]+)", r"'(eval_loss)': '?(-?[\d.]+)", r"'(loss)': '?(-?[\d.]+)")
MIB = 1 << 20
# Options of each script with --quick.
QUICK = {
    "sft": ["--max_steps", "2", "--text_characters", "60000"],
    "grpo": ["--max_steps", "1", "--supervised_steps", "1", "--num_prompts", "64"],
}
WHY_REWARDS_DIFFER = (
    "Why the two GRPO runs end at different rewards, from the same seed: the kernels add the same numbers up in "
    "another order, so a probability differs in its last bit; at some step another token is drawn, and from there on "
    "each run learns from completions of its own. Another number of CPU threads does the same to two runs "
    "without the kernels. `npu-kernels verify` measures that noise, and compares with it."
)


@dataclass(frozen=True)
class Run:
    """One process: a script, with the kernels or without."""

    script: str
    kernels: bool

    @property
    def title(self) -> str:
        """The run's name on the screen."""
        return f"{self.script} {'with' if self.kernels else 'without'} the kernels"

    def command(self, output_dir: Path, seed: int, quick: bool) -> list[str]:
        """Returns the command line; two runs of a script differ only in the flag."""
        command = [sys.executable, str(HERE / f"{self.script}.py"), "--output_dir", str(output_dir)]
        command += ["--seed", str(seed), "--disable_tqdm", "True", *(QUICK[self.script] if quick else [])]
        return [*command, "--use_npu_kernels"] if self.kernels else command


RUNS = tuple(Run(script, kernels) for script in ("sft", "grpo") for kernels in (False, True))


class RunFailedError(RuntimeError):
    """A run ended with an error; the message has the end of its output."""


def shown(line: str) -> str | None:
    """Returns the progress in a line of output, or None."""
    for pattern in SHOWN:
        match = re.search(pattern, line)
        if match is not None:
            return f"{match[1]} {float(match[2]):.3f}"
    return "warming up" if line.startswith("warming up") else None


def execute(run: Run, output_dir: Path, seed: int, quick: bool, progress: Progress) -> dict[str, Any]:
    """Runs one process, shows its progress, writes its output to `log.txt` and returns its metrics."""
    output_dir.mkdir(parents=True, exist_ok=True)
    metrics = output_dir / "metrics.json"
    metrics.unlink(missing_ok=True)  # otherwise those of an earlier demo could be read
    task = progress.add_task(run.title, total=None, note="starting")
    tail: deque[str] = deque(maxlen=30)
    command = run.command(output_dir, seed, quick)
    with (
        (output_dir / "log.txt").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            # Unbuffered, since a pipe would show progress only every few kilobytes. NPU_KERNELS_RUN=0, since only the
            # flag may apply the kernels.
            env={**os.environ, "PYTHONUNBUFFERED": "1", "NPU_KERNELS_RUN": "0"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                tail.append(line)
                note = shown(line)
                if note is not None:
                    progress.update(task, note=note)
        except BaseException:  # also an interrupt: the process must not outlive the demo
            process.kill()
            raise
    progress.update(task, total=1, completed=1)
    if process.returncode != 0:
        progress.update(task, note="[red]failed")
        raise RunFailedError(f"{' '.join(command)}\nended with status {process.returncode}:\n{''.join(tail)}")
    return json.loads(metrics.read_text(encoding="utf-8"))


def table(results: dict[Run, dict[str, Any]]) -> Table:
    """Returns a table with one row per run, which shows what the flag changed."""
    result = Table(title="The same runs, without and with --use_npu_kernels")
    result.add_column("run")
    for name in ("loss or reward", "held out", "peak memory", "seconds", "generation + update", "tokens/s"):
        result.add_column(name, justify="right")
    for run, metrics in results.items():
        quality = "loss" if run.script == "sft" else "reward"
        held_out = metrics["eval_loss" if run.script == "sft" else "held_out_reward"]
        result.add_row(
            run.title,
            f"{quality} {metrics[f'first_{quality}']:.3f} -> {metrics[f'final_{quality}']:.3f}",
            f"{held_out:.3f}",
            f"{metrics['peak_memory_bytes'] / MIB:,.0f} MiB",
            f"{metrics['seconds']:.1f}",
            "-" if run.script == "sft" else f"{metrics['generation_seconds']:.1f} + {metrics['update_seconds']:.1f}",
            f"{metrics['tokens_per_second']:,.0f}",
            end_section=run.kernels,
        )
    return result


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="of all the runs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a step or two of each run, to see that the demo works")
    args = parser.parse_args()
    console, results, start = Console(), {}, time.monotonic()
    texts = (TextColumn("{task.description}"), TextColumn("{task.fields[note]}"))
    try:
        with Progress(SpinnerColumn(), *texts, TimeElapsedColumn(), console=console) as progress:
            for run in RUNS:
                if not console.is_terminal:  # the live display would show only its last state
                    console.print(f"{time.monotonic() - start:.0f} s: {run.title}")
                folder = args.output_dir / f"{run.script}-{'kernels' if run.kernels else 'plain'}"
                results[run] = execute(run, folder, args.seed, args.quick, progress)
    except RunFailedError as error:
        console.print(f"[red]The demo failed.[/red] {args.output_dir} holds the whole output.")
        console.print(str(error), markup=False, highlight=False)
        return 1
    console.print(table(results))
    console.print(WHY_REWARDS_DIFFER, markup=False, highlight=False)
    for run, metrics in results.items():
        if metrics["kernels"] is not None:
            # `Text`, since the report's [brackets] are not markup.
            report = Text(metrics["kernels"])
            console.print(Panel(report, title=f"{run.script}: what the flag replaced", title_align="left"))
    console.print(f"{time.monotonic() - start:.0f} seconds in all; models, metrics and logs are in {args.output_dir}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
