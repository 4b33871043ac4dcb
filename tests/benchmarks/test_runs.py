"""Runs: each step has lengths and ids of its own, which are the same for all variants, and how its time is counted."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cli, endtoend, ranks, report, results, run_times, step_cases, step_clock, steps, tables
from benchmarks.draws import Draws

CPU = torch.device("cpu")
GRPO = step_cases.StepWorkload("grpo-trl", "tiny-qwen3", 8, 20, 12, lengths="exponential", group=2)
SFT = step_cases.StepWorkload("sft-trainer", "tiny-qwen3", 4, 40, lengths="exponential")
DPO = step_cases.StepWorkload("dpo-trl", "tiny-qwen3", 2, length=12, prompt=2, least=3)
DISTILLATION = step_cases.StepWorkload("distil-trl", "tiny-qwen3", 4, 8, 4, lengths="exponential", teacher="tiny-qwen3")


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn
# ---------------------------------------------------------------------------------------------------------------------


def test_each_step_and_each_rank_has_lengths_and_ids_of_its_own():
    draws = Draws(GRPO)
    for draw in (draws.rows, draws.prompts, Draws(DPO).pairs):
        found = [draw(step, rank) for step in range(3) for rank in range(3)]
        assert found == [draw(step, rank) for step in range(3) for rank in range(3)]
        assert len({json.dumps(batch) for batch in found}) == 9
    every = [[len(ids) for ids in draws.rows(step)] for step in range(300)]
    assert len({tuple(lengths) for lengths in every}) == 300
    assert {len(lengths) for lengths in every} == {8}
    assert (min(map(min, every)), max(map(max, every))) == (1, 20)
    assert sum(map(sum, every)) / 2400 / 20 == pytest.approx(0.37, abs=0.02)
    prompts = [[len(ids) for ids in draws.prompts(step)] for step in range(300)]
    assert {len(lengths) for lengths in prompts} == {4}
    assert (min(map(min, prompts)), max(map(max, prompts))) == (3, 12)
    assert {id for ids in draws.rows(0) for id in ids} & {0, 1, 2} == set()


def test_typical_steps_have_as_many_tokens_as_steps_on_average():
    workload = dataclasses.replace(GRPO, length=4000)
    drawn, typical = (
        [sum(map(len, Draws(workload, typical_from=first).rows(step))) for step in range(200)] for first in (None, 0)
    )
    assert len(set(typical)) == 1
    assert typical[0] == pytest.approx(sum(drawn) / 200, rel=0.03)
    assert len({tuple(map(len, Draws(workload, typical_from=0).rows(step))) for step in range(9)}) == 9
    assert Draws(workload, typical_from=2).rows(1) == Draws(workload).rows(1)


def test_pairs_are_of_drawn_lengths():
    draws = Draws(step_cases.StepWorkload("dpo-trl", "tiny-llama", 8, length=884, prompt=16, least=14))
    pairs = [pair for step in range(25) for pair in draws.pairs(step)]
    lengths = [len(pair[name]) for pair in pairs for name in ("chosen_ids", "rejected_ids")]
    assert 14 <= min(lengths) < 30 < 860 < max(lengths) <= 884
    assert {len(pair["prompt_ids"]) for pair in pairs} == {16}
    # As many from either half.
    assert sum(lengths) == pytest.approx(400 * (14 + 884) / 2, rel=0.1)


@pytest.mark.parametrize("group", [2, 4])
def test_a_batch_of_prompts_and_completions(group):
    workload = step_cases.StepWorkload("sft", "tiny-llama", 4, 30, 12, lengths="exponential", group=group)
    draws = Draws(workload)
    batches = [draws.batch(3, rank) for rank in range(3)]
    for rank, batch in enumerate(batches):
        ids, mask, labels = batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]
        prompts, rows = draws.prompts(3, rank), draws.rows(3, rank)
        longest = max(map(len, prompts))
        assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == [
            prompts[i // group] + row for i, row in enumerate(rows)
        ]
        assert (ids[~mask] == 0).all()
        # Prompts are padded on the left, completions on the right; completions alone bear a loss.
        assert mask[:, longest - 1 : longest + 1].all()
        assert torch.equal(labels != -100, mask & (torch.arange(ids.shape[1]) >= longest))
        assert torch.equal(labels[labels != -100], ids[labels != -100])
    assert len({int(batch["attention_mask"].sum()) for batch in batches}) > 1
    whole = Draws(dataclasses.replace(workload, whole_prompts=True))
    assert {len(prompt) for step in range(9) for prompt in whole.prompts(step)} == {12}


def test_a_batch_without_padding_has_no_mask():
    draws = Draws(step_cases.StepWorkload("sft", "tiny-llama", 2, 8))
    assert set(draws.batch(0)) == {"input_ids", "labels"}
    assert not torch.equal(draws.batch(0)["input_ids"], draws.batch(1)["input_ids"])


# ---------------------------------------------------------------------------------------------------------------------
# What a trainer gets
# ---------------------------------------------------------------------------------------------------------------------


def given_to(trainer) -> list[list[list[int]]]:
    """The live tokens of each row of each batch that a trainer computes a loss of."""
    found, compute = [], trainer.compute_loss

    def seen(model, inputs, *args, **kwargs):
        parts = [(inputs["input_ids"], inputs["attention_mask"])] if "input_ids" in inputs else [
            (inputs[f"{part}_ids"], inputs[f"{part}_mask"]) for part in ("prompt", "completion")
        ]  # fmt: skip
        ids, mask = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        found.append([row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)])
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = seen
    trainer.train()
    return found


def drawn_for(workload, step, typical_from):
    draws = Draws(workload, typical_from=typical_from)
    if workload.name == "dpo-trl":
        pairs = draws.pairs(step)
        return [pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids") for pair in pairs]
    rows = draws.rows(step)
    prompts = draws.prompts(step)
    return [prompts[i * len(prompts) // len(rows)] + row for i, row in enumerate(rows)]


@pytest.mark.parametrize("workload", [GRPO, SFT, DPO, DISTILLATION], ids=lambda workload: workload.name)
def test_each_step_of_a_trainer_gets_what_is_drawn_for_it(workload, tmp_path):
    for variant in ("plain", "flag"):
        clock = step_clock.Clock(CPU)
        trainer, seen = steps.build_trainer(workload, step_cases.VARIANTS[variant], 3, str(tmp_path), clock, typical=1)
        found = given_to(trainer)
        # GRPO may arrange the rows of a step.
        assert [sorted(batch) for batch in found] == [sorted(drawn_for(workload, step, 2)) for step in range(3)]
        assert seen.live == [sum(map(len, batch)) for batch in found]


def test_batches_of_ranks_are_taken_in_order():
    """A sampler in order gives the first batch of a step to the first rank."""
    settings = SimpleNamespace(world_size=3)
    found = steps._Run(SFT, 2, 0).of_all_ranks(settings, Draws.rows)
    assert found == [ids for step in range(2) for rank in range(3) for ids in Draws(SFT).rows(step, rank)]


def test_a_prompts_text_is_its_ids():
    ids = [3, 96, 17]
    assert steps._tokenizer("tiny-qwen3")(text=["3 96 17"])["input_ids"] == [ids]


# ---------------------------------------------------------------------------------------------------------------------
# What is counted
# ---------------------------------------------------------------------------------------------------------------------


def test_figures_of_a_run():
    """Steps of 1 s to the third, 0.4 s to the tenth, then 0.1 s, of which one of 40 captures for 2 s."""
    each = [1.0] * 2 + [0.4] * 7 + [2.1] + [0.1] * 39
    live = [1000] * 10 + [30] * 40
    found = run_times.figures(each, live, [2 * n for n in live], 50.0)
    assert found["mean_ms"] == pytest.approx((2100 + 39 * 100) / 40)
    assert found["mean_all_ms"] == pytest.approx((7 * 400 + 2100 + 39 * 100) / 47)
    assert (found["ms"]["median"], found["ms"]["samples"]) == (pytest.approx(100), 25)
    assert found["busy_ratio"] == pytest.approx(found["mean_ms"] / 50)
    assert found["each_ms"] == [1e3 * seconds for seconds in each]
    assert (found["tokens"], found["positions"], found["live_share"]) == (30, 60, 0.5)
    assert found["tokens_per_second"] == pytest.approx(40 * 30 / 6)
    assert run_times.figures(each, live, live, None)["busy_ratio"] is None


@pytest.mark.parametrize(
    ("steps", "means"), [(2, (2, 2, 2)), (3, (2.5, 2.5, 2.5)), (8, (6.5, 6, 6.5)), (30, (20.5, 17, 23))]
)
def test_of_a_short_run_the_second_half_counts(steps, means):
    """The n-th step takes n ms."""
    found = run_times.figures([n / 1e3 for n in range(2, steps + 1)], [1] * steps, [1] * steps, None)
    assert (found["mean_ms"], found["mean_all_ms"], found["ms"]["median"]) == pytest.approx(means)


def test_steps_that_are_profiled_are_no_part_of_the_times(monkeypatch):
    """On a device, for which a CPU stands; each step takes a second of the clock."""
    began = []

    class Profile:
        def __init__(self, device, count):
            began.append((len(clocks[0]._ends), count))

        def stop(self):
            return {"collectives": {}, "profiled": {"device_busy_ms": 500.0}}

    class Scripted(step_clock.Clock):
        def __init__(self, device):
            super().__init__(CPU)
            clocks.append(self)

        def _now(self):
            return float(len(self._ends))

    clocks = []
    monkeypatch.setattr(ranks, "_StepProfile", Profile)
    monkeypatch.setattr(endtoend, "Clock", Scripted)
    monkeypatch.setattr(endtoend, "profiled_steps", lambda device: 2)

    def built(*args, build=endtoend.build_trainer, **options):
        counts.append(build(*args, **options))
        return counts[-1]

    counts = []
    monkeypatch.setattr(endtoend, "build_trainer", built)
    found = endtoend.train(SFT, "plain", steps=4)
    assert began == [(6, 2)]
    # Their lengths are typical, and those of the two steps ahead of them.
    typical = Draws(SFT, typical_from=4)
    assert counts[0][1].live == [sum(map(len, typical.rows(step))) for step in range(8)]
    assert found["each_ms"] == [1e3] * 3
    assert (found["busy_ms"], found["busy_ratio"]) == (500.0, 2.0)
    assert found["tokens"] == sum(len(ids) for step in (2, 3) for ids in Draws(SFT).rows(step)) / 2
    assert found["profiled"] == {"device_busy_ms": 500.0, "preparation_ms": 0.0}


def test_times_of_several_steps_are_those_of_one():
    kinds = torch.autograd.DeviceType

    def event(name, begin, end):
        return SimpleNamespace(
            device_type=lambda: kinds.CUDA, is_user_annotation=lambda: False, name=lambda: name,
            start_ns=lambda: begin, duration_ns=lambda: end - begin,
        )  # fmt: skip

    events = [event("gemm", 0, 4_000_000), event("gemm", 3_000_000, 6_000_000)]
    events += [event("ncclDevKernel_AllReduce_Sum", 9_000_000, 11_000_000)] * 2
    found = ranks.what_ran(events, on_cuda=True, steps=2)
    assert found["collectives"] == {"AllReduce": 1}
    did = found["profiled"]
    assert (did["device_busy_ms"], did["communication_ms"], did["events"]) == (4.0, 1.0, 2)
    assert did["largest"][0] == {"kernel": "gemm", "ms": 3.5, "launches": 1}


def test_the_share_of_bodies_is_that_of_the_steps_that_count():
    log = [{"step": step, "bodies_replayed": share} for step, share in ((1, 0.0), (10, 0.5), (20, 0.8), (30, 1.0))]
    assert steps.bodies_replayed(log) == pytest.approx(0.9)
    assert steps.bodies_replayed(log[:2]) == 0.5
    assert steps.bodies_replayed([{"step": 1}, {"step": 20}]) is None


def test_a_row_of_a_run_has_what_was_captured():
    rows = {name: endtoend.train(SFT, name, steps=12) for name in ("plain", "flag-body")}
    plain, body = rows["plain"], rows["flag-body"]
    assert (plain["capture_seconds"], plain["bodies_replayed"], plain["busy_ms"]) == (0.0, None, None)
    assert "captured" not in plain
    assert body["capture_seconds"] == body["captured"]["seconds"] > 0
    assert 0 < body["bodies_replayed"] <= 1
    assert body["tokens"] == plain["tokens"]
    assert not endtoend.differs({**body, "dtype": "float32"}, plain)


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def row(provider, ms, **changes):
    found = run_times.figures([ms / 1e3] * 49, [100] * 50, [200] * 50, 40.0)
    sizes = {name: value for name, value in dataclasses.asdict(GRPO).items() if name not in ("name", "size")}
    return {
        "group": "end-to-end", "op": GRPO.name, "shape": GRPO.shape, "sizes": sizes, "dtype": "float32",
        "provider": provider, "version": "1", "mode": "run", "status": "ok", **found, "peak_bytes": 1 << 30,
        "losses": [1.0], "grad_norms": [1.0], "ran": {}, "capture_seconds": 0.0, "bodies_replayed": None,
        "process_seconds": 9.0, **changes,
    }  # fmt: skip


def test_a_report_has_the_figures_of_a_run():
    rows = [row("plain", 300.0), row("flag", 50.0, capture_seconds=1.25, bodies_replayed=0.975)]
    text = report.markdown(results.environment(CPU, []), rows)
    assert "| plain | 300 | 300 [300, 300] | 300 | 40 | 7.50 |  | 0.0 | 333 |" in text
    assert "| flag | 50 | 50 [50, 50] | 50 | 40 | 1.25 | 98% | 1.2 | 2000 |" in text
    assert "| 6.000 | 1.000 |" in text
    lines = tables._table(rows)
    assert lines[3].endswith("| ms a step | 300.0 (7.50 x busy) | 50.0 (1.25 x busy) |")
    assert lines[4].endswith("| from the fourth step on | 300.0 | 50.0 |")
    # Where the device's time is not known.
    plain, flag = (row(name, 300.0, busy_ms=None, busy_ratio=None) for name in ("plain", "flag"))
    assert tables._table([plain, flag])[3].endswith("| ms a step | 300.0 | 300.0 |")


def test_older_results_stay_readable():
    """Rows of one batch for all steps, as committed files have them, and what they say of it."""
    file, _ = tables.source_of()
    meta, rows = results.read(file)
    assert not any("mean_ms" in row for row in rows)
    text = report.markdown(meta, rows)
    plain = next(row for row in rows if (row["op"], row["provider"]) == ("sft-trainer", "plain"))
    assert f"| plain |  | {report._ms(plain)} |  |  |  |  |  | {plain['tokens_per_second']:.0f} |" in text
    assert not any("ms a step" in line for line in tables._table(rows))


def test_variants_are_run_in_the_order_in_which_they_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_cases, "workloads", lambda kind: [GRPO, SFT])
    ran, there = [], []

    def run(workload, variant, steps, timeout):
        file = tmp_path / "r.json"
        there.append(len(results.read(file)[1]) if file.exists() else 0)
        ran.append((workload.name, variant, steps))
        return row(variant, 10.0, op=workload.name, shape=workload.shape)

    monkeypatch.setattr(endtoend, "run", run)
    command = [
        "--device",
        "cpu",
        "--groups",
        "end-to-end",
        "--output",
        str(tmp_path),
        "--name",
        "r",
        "--only",
        "grpo-trl",
    ]
    assert cli.main([*command, "--variants", "flag,plain"]) == 0
    assert ran == [("grpo-trl", "flag", endtoend.STEPS), ("grpo-trl", "plain", endtoend.STEPS)]
    # Each is in the file as soon as it is there.
    assert there == [0, 1]
    assert "grpo-trl tiny-qwen3 8x(..12+..20 exponential), 2 a prompt flag: 10.0 ms (0.25x busy)" in (
        capsys.readouterr().out
    )
