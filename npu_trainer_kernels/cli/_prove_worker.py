"""Runs one part of `npu-kernels prove` in a separate process: it lists the items, begins one after the other, and
records each. An exception that is not caught here ends the process, and the parent records it for the current item.

    echo '["done items"]' | python -m npu_trainer_kernels.cli._prove_worker PART [MOST_ITEMS]
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import backends, device
from ..descriptions import of_model
from ..evidence import tuned
from ..evidence.table import TABLE
from ..ops.launch import KernelError
from ..support.errors import one_line
from ..support.optional import require
from ..support.triton import MissingDependencyError
from ..timing import QUICK, Settings, is_accelerator
from ..verify import Curves, Variant, judge_runs, record
from . import _tune
from ._bench import package
from ._process import Lines, ended
from ._selfcheck import CHECKED, CHECKED_TOKENS, TIMED, check, facts

__all__ = ["PARTS", "Items", "main"]

# The most important first, since time may run out.
DTYPES = ("bfloat16", "float32", "float16")
PROVIDERS = ("ours-triton", "ours-vendor", "ours-torch", "reference")
# As many noisy runs as in the convergence suite, since there are several cases; the rule is that of `verify`.
NOISE_RUNS = 10
CONVERGENCE_STEPS = 16


def _benchmarks(module: str) -> Any:
    return importlib.import_module(f"{package()}.{module}")


class Items:
    """The items of a part, which reports them to the parent.

    Args:
        lines: the lines to the parent.
        done: items that are done already.
        most: the number of items that the part has at most; None: all.
    """

    def __init__(self, lines: Lines, done: set[str], most: int | None = None) -> None:
        self._lines, self._done, self._most = lines, done, most

    def todo(self, names: list[str]) -> list[str]:
        """Reports all items to the parent, and returns those that are not done."""
        names = names[: self._most]
        self._lines.write(items=names)
        return [name for name in names if name not in self._done]

    def begin(self, name: str) -> None:
        self._lines.write(begins=name)

    def record(self, name: str, status: str, **found: Any) -> None:
        """Reports a result. `status`: ok, wrong, failed, or absent (it cannot run on this machine)."""
        self._lines.write(item=name, status=status, **found)

    def each(self, names: list[str]) -> Iterator[str]:
        """Returns the items that are not done, and reports the beginning of each."""
        for name in self.todo(names):
            self.begin(name)
            yield name


def _where() -> torch.device:
    return torch.device(device.accelerator())


# ------------------------------------------------------------------------------------------------------- device, checks
def _device(items: Items) -> None:
    where = _where()
    for name in items.each(["device"]):
        meta = _benchmarks("results").environment(where, [], commit="not asked")
        count = torch.get_device_module(where).device_count() if is_accelerator(where) else 1
        # The command has paths, and the commit may be one of the user's repository.
        del meta["command"], meta["commit"]
        known = facts(where)
        items.record(name, "ok", meta=meta, count=count, chip=known["device"]["name"], sized_as=known["sized_as"],
                     without_npu=known["without_npu"])  # fmt: skip


def _choice(op: str, where: torch.device) -> dict[str, Any]:
    backend, reason = backends.explain(op, where)
    return {"backend": backend, "reason": reason, "plain": backends.keeps_plain(op, where)}


def _checks(items: Items) -> None:
    where = _where()
    works = {(work.op, dtype): work for dtype in DTYPES for work in of_model(CHECKED, CHECKED_TOKENS, dtype)}
    todo = {
        f"{op}/{backend}/{dtype}": (work, backend)
        for (op, dtype), work in works.items()
        for backend in _tune.candidates(work, where)
    }
    # The choices come first, since they say which backend the other parts measure.
    for name in items.each(["choices", *todo]):
        if name == "choices":
            items.record(name, "ok", choices={work.op: _choice(work.backend_op, where) for work in works.values()})
            continue
        work, backend = todo[name]
        row = {"op": work.op, "backend": backend, "dtype": work.dtype, "shape": work.shape}
        try:
            problem = check(work, where, backends.strict_override(backend))
        except (KernelError, torch.OutOfMemoryError) as error:
            items.record(name, "failed", **row, reason=one_line(error))
        except ValueError as error:
            # The vendor's operators cover only some calls.
            items.record(name, "absent" if backend == "vendor" else "failed", **row, reason=one_line(error))
        else:
            items.record(name, "ok" if problem is None else "wrong", **row, reason=problem)


# -------------------------------------------------------------------------------------------------------------- kernels
def _cases(where: torch.device) -> list[Any]:
    """Returns the cases on which the evidence in the table of ops is based; on a CPU smaller ones."""
    cases = _benchmarks("cases")
    if not is_accelerator(where):
        shapes, tokens = TIMED[False]
        works = of_model(shapes, tokens, "float32")
        return [cases.OpCase(work.op, work.sizes, work.dtype) for work in works if work.op in cases.OPS]
    wanted = [case for case in cases.table(where.type) if case.group == "ops"]
    # The first case of every op comes before the second of any, since time may run out.
    rows_of: Counter[str] = Counter()
    rank = {}
    for case in wanted:
        rank[case.key] = rows_of[case.op]
        rows_of[case.op] += 1
    return sorted(wanted, key=lambda case: rank[case.key])


def _kernels(items: Items) -> None:
    """Measures the benchmarks' rows: every op and the head, with each of our backends, the vendor's operator and plain
    PyTorch."""
    results, runner = _benchmarks("results"), _benchmarks("runner")
    where = _where()
    settings = Settings() if is_accelerator(where) else QUICK
    by_case = runner.cells(_cases(where), lambda path: path.rpartition("/")[2] in PROVIDERS)
    todo = set(items.todo([cell.path for of_case in by_case for cell in of_case]))
    with tempfile.TemporaryDirectory() as folder:
        found = results.Results(Path(folder) / "rows.json", results.environment(where, [], commit="not asked"))
        for of_case in by_case:
            left = [cell for cell in of_case if cell.path in todo]
            if not left:
                continue
            items.begin(left[0].path)
            speed = runner.measured_bandwidth(found, where, settings)
            for cell, rows in runner.run_case(left, where, settings, found, runner.Budget(None), speed):
                items.record(cell.path, _status(rows), rows=rows, reason=_reason(rows))
                following = left[left.index(cell) + 1 :]
                if following:
                    items.begin(following[0].path)


def _status(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    if any(row.get("verdict") in ("wrong", "inaccurate") for row in rows):
        return "wrong"
    # The vendor's operators cover only some calls.
    if first["provider"] == "ours-vendor" and first.get("reason", "").startswith("ValueError"):
        return "absent"
    return {"ok": "ok", "absent": "absent", "error": "failed"}[first["status"]]


def _reason(rows: list[dict[str, Any]]) -> str | None:
    """Returns why a row has no valid result, or None."""
    first = rows[0]
    if first.get("verdict") not in ("wrong", "inaccurate"):
        return first.get("reason")
    worst = max(first["errors"], key=first["errors"].get)
    return f"{first['verdict']}: {worst} is off by {first['errors'][worst]:.2g} of its norm"


# ------------------------------------------------------------------------------------------------- steps, ranks, curves
def _workloads(kind: str) -> list[Any]:
    """Steps of SFT, GRPO and DPO; on an accelerator such as fit 32 GiB without the kernels, too."""
    workload = _benchmarks("step_cases").StepWorkload
    if kind == "cpu":
        return [
            workload("sft-trainer", "demo-llama", 4, 128),
            workload("grpo-trl", "demo-qwen3", 8, 64, 64, lengths="exponential"),
            workload("dpo-trl", "demo-llama", 2, length=120, prompt=16, least=14),
        ]
    return [
        workload("sft-trainer", "llama-1b", 4, 1024),
        workload("grpo-trl", "qwen3-0.6b", 8, 2048, 512, lengths="exponential"),
        workload("dpo-trl", "llama-1b", 2, length=884, prompt=16, least=14),
    ]


def _without_trl(workload: Any) -> str | None:
    """Returns why a workload with a trainer of TRL cannot run, or None."""
    try:
        if workload.name.endswith("-trl"):
            require(workload.name, "trl", "datasets")
    except MissingDependencyError as error:
        return str(error)
    return None


def _steps(items: Items) -> None:
    endtoend = _benchmarks("endtoend")
    where = _where()
    todo = {
        f"{workload.key}/{variant}": (workload, variant)
        for workload in _workloads(where.type)
        for variant in ("plain", "flag")
    }
    for name in items.each(list(todo)):
        workload, variant = todo[name]
        missing = _without_trl(workload)
        if missing is not None:
            items.record(name, "absent", rows=[], reason=missing)
            continue
        # Without a time limit, since the parent process has one.
        row = endtoend.run(workload, variant, 16 if is_accelerator(where) else 8, None)
        # The log has paths.
        row.pop("log", None)
        row.setdefault("version", "")
        items.record(name, _status([row]), rows=[row], reason=_reason([row]))


def _ranks(items: Items) -> None:
    """Measures two ranks: collectives over HCCL, NCCL or gloo, and steps without a wrapper, with DDP and with FSDP2."""
    distributed, endtoend = _benchmarks("distributed"), _benchmarks("endtoend")
    where = _where()
    accelerated = is_accelerator(where)
    wanted = ["--size", "qwen3-0.6b", "--batch", "4", "--length", "1024", "--steps", "16"] if accelerated else [
        "--size", "tiny-llama", "--batch", "2", "--length", "48", "--steps", "8",
    ]  # fmt: skip
    for name in items.each(["two ranks"]):
        count = torch.get_device_module(where).device_count() if accelerated else 2
        if count < 2:
            items.record(name, "absent", rows=[], reason=f"there is one {where.type} device")
            continue
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            output = Path(folder) / "rows.json"
            command = [sys.executable, "-m", distributed.__name__, *wanted, "--lengths", "exponential",
                       "--commit", "not asked", "--output", str(output)]  # fmt: skip
            reason = _run_ranks(command, port, Path(folder), endtoend.ROOT)
            rows = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else []
        items.record(name, "ok" if reason is None else "failed", rows=rows, reason=reason)


def _run_ranks(command: list[str], port: int, folder: Path, root: Path) -> str | None:
    """Runs a command as two ranks; returns why the first one that failed did, or None."""
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(open(folder / f"rank{rank}", "w+", encoding="utf-8")) for rank in range(2)]
        ranks = [
            subprocess.Popen(
                command, cwd=root, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            )
            for rank, stream in enumerate(said)
        ]  # fmt: skip
        codes = [rank.wait() for rank in ranks]
        for code, stream in zip(codes, said, strict=True):
            stream.seek(0)
            reason = ended(code, stream.readlines())
            if reason is not None:
                return reason
    return None


def _curves(workload: Any, precision: str) -> Callable[[Variant], Curves]:
    """A short training of a small model on data that it can learn by heart."""
    step_cases, models, steps = (_benchmarks(name) for name in ("step_cases", "models", "steps"))
    vocabulary = models.MODELS[workload.size][1]["vocab_size"]
    held_out = torch.randint(3, vocabulary, (4, 24), generator=torch.Generator().manual_seed(9))

    def run(variant: Variant) -> Curves:
        how = step_cases.VARIANTS["flag" if variant.patched else "plain"]
        # GRPO's configuration has a bf16 of its own.
        options = {"bf16": True} if precision == "bf16-autocast" else {}
        with tempfile.TemporaryDirectory() as folder:
            trainer, _ = steps.build_trainer(
                workload, how, CONVERGENCE_STEPS, folder, _benchmarks("step_clock").Clock(_where()),
                logging_steps=1, learning_rate=1e-3, logging_nan_inf_filter=False, **options,
            )  # fmt: skip
            if workload.name != "grpo-trl":
                few = 2 * workload.batch
                data = trainer.train_dataset
                trainer.train_dataset = data[:few] if isinstance(data, list) else data.select(range(few))
            return record(trainer, held_out, variant)

    return run


def _convergence(items: Items) -> None:
    workload = _benchmarks("step_cases").StepWorkload
    todo = {
        "sft, llama, fp32": (workload("sft-trainer", "tiny-llama", 4, 40, lengths="exponential"), "fp32"),
        "grpo, qwen3, fp32": (workload("grpo-trl", "tiny-qwen3", 8, 12, 6, lengths="exponential", group=4), "fp32"),
        "dpo, llama, fp32": (workload("dpo-trl", "tiny-llama", 4, length=20, prompt=6, least=4), "fp32"),
        "sft, gemma3, bf16 autocast": (workload("sft-trainer", "tiny-gemma3", 4, 40), "bf16-autocast"),
    }
    for name in items.each(list(todo)):
        given, precision = todo[name]
        missing = _without_trl(given)
        if missing is not None:
            items.record(name, "absent", reason=missing)
            continue
        run = _curves(given, precision)
        losses: dict[str, list[float]] = {}

        def kept(variant: Variant, run: Any = run, losses: dict[str, list[float]] = losses) -> Curves:
            curves = run(variant)
            if variant.noise_seed is None:
                losses["with" if variant.patched else "without"] = curves.scalars["loss"]
            return curves

        verdict = judge_runs(kept, precision, NOISE_RUNS)
        items.record(
            name, "ok" if verdict.passed else "wrong", steps=CONVERGENCE_STEPS, losses=losses,
            checks=[{"name": c.name, "noise_floors": c.ratio, "allowed": c.k} for c in verdict.checks],
            reason="; ".join(verdict.failures())[:1000] or None,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- table
def _table(items: Items) -> None:
    """Measures what `npu-kernels tune` would store, op by op."""
    where = _where()
    accelerated = is_accelerator(where)
    shapes, tokens = TIMED[accelerated]
    dtype = "bfloat16" if accelerated else "float32"
    settings = None if accelerated else QUICK
    checked = {work.op: work for work in of_model(CHECKED, CHECKED_TOKENS, dtype)}
    # The first form of an op decides its backend.
    forms = {op.forms[0]: name for name, op in TABLE.items()}
    settled: dict[tuned.TileKey, tuned.Variation] = {}
    with tuned.ignored():
        works = [work for work in _tune.pairs(shapes, tokens, dtype) if work.op in forms]
        for name in items.each(list(TABLE)):
            of_op = [work for work in works if forms[work.op] == name]
            outcomes: list[_tune.Outcome] = []
            for work in of_op:
                outcomes.append(_tune.tune_op(work, checked[work.op], where, settings, settled))
                settled |= outcomes[-1].tiles
            machine = tuned.machine_of(_tune.results(outcomes), _tune.tiles_of(outcomes))
            wrong = {f"{o.work.tokens} tokens, {who}": what for o in outcomes for who, what in o.problems.items()
                     if who in ("torch", "triton")}  # fmt: skip
            items.record(
                name, "wrong" if wrong else "ok", machine=machine.as_json(),
                outcomes=[_tune.as_json(outcome) for outcome in outcomes],
                reason="; ".join(f"{who}: {what}" for who, what in wrong.items()) or None,
            )  # fmt: skip


PARTS: dict[str, Callable[[Items], None]] = {
    "device": _device,
    "checks": _checks,
    "kernels": _kernels,
    "steps": _steps,
    "convergence": _convergence,
    "ranks": _ranks,
    "table": _table,
}


def main() -> int:
    part, *most = sys.argv[1:]
    lines = Lines()
    PARTS[part](Items(lines, set(json.loads(sys.stdin.read())), *map(int, most)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
