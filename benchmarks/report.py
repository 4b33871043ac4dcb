"""Makes tables in Markdown and on the terminal, and plots, from rows."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from .endtoend import differs, ratios
from .results import Comparison, Row

__all__ = ["comparison_table", "markdown", "plot", "terminal_tables"]

MODES = ("forward", "backward", "both")
FLOOR = "floor"
# Labels for the x axis of scaling curves, by the size that varies.
AXIS_LABELS = {"BT": "tokens", "V": "vocabulary", "H": "hidden size"}


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _ops(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns (group, op) of the rows that are not end to end, in order."""
    return _unique((r["group"], r["op"]) for r in rows if r["group"] != "end-to-end")


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [r for r in rows if all(r.get(k) == v for k, v in wanted.items())]


def _ms(row: Row) -> str:
    ms = row["ms"]
    return f"{ms['median']:.4g} [{ms['q1']:.4g}, {ms['q3']:.4g}]"


def _mode_cell(rows: Sequence[Row], mode: str) -> str:
    """Returns median [quartiles], and the ratio to the floor."""
    found = _of(rows, mode=mode)
    if not found or found[0]["status"] != "ok":
        return ""
    row = found[0]
    ratio = f", {row['floor_ratio']:.2f}x" if row.get("floor_ratio") else ""
    return _ms(row) + ratio


def _rate(row: Row) -> str:
    if row.get("tflops"):
        return f"{row['tflops']:.3g} TFLOP/s"
    return f"{row.get('gbps', 0):.4g} GB/s"


def _error(row: Row) -> str:
    found = row.get("errors")
    if not found:
        return str(row.get("verdict", ""))
    worst = max(found, key=found.get)
    text = f"{found[worst]:.1e} ({worst})"
    return text if row["verdict"] == "ok" else f"{text} **{row['verdict'].upper()}**"


def _mib(count: float | None) -> str:
    return "" if count is None else f"{count / (1 << 20):.1f}"


def _fields(rows: Sequence[Row]) -> list[str]:
    """Returns the columns of one provider at one shape."""
    last = rows[-1]
    name = [last["shape"], last["provider"]]
    if last["status"] != "ok":
        return [*name, "", "", "", "", "", "", f"{last['status']}: {last['reason']}"]
    times = [_mode_cell(rows, mode) for mode in MODES]
    return [
        *name,
        *times,
        _mib(last.get("extra_bytes")),
        _rate(last),
        ", ".join(f"{row['host_us']:.0f}" for mode in MODES[:2] for row in _of(rows, mode=mode) if row.get("host_us")),
        _error(last) if last["provider"] != FLOOR else "",
    ]


COLUMNS = (
    "shape",
    "provider",
    "forward ms",
    "backward ms",
    "both ms",
    "extra MiB",
    "rate",
    "host us",
    "error / why not",
)


def _op_lines(rows: Sequence[Row], group: str, op: str) -> list[list[str]]:
    of_op = _of(rows, group=group, op=op)
    lines = []
    for shape in _unique(r["shape"] for r in of_op):
        of_shape = _of(of_op, shape=shape)
        lines += [_fields(_of(of_shape, provider=p)) for p in _unique(r["provider"] for r in of_shape)]
    return lines


BRIEF_COLUMNS = ("shape", "provider", "forward", "backward", "both", "extra MiB", "accuracy")
E2E_COLUMNS = (
    "workload",
    "shape",
    "variant",
    "step ms",
    "median",
    "all steps",
    "device busy",
    "step / busy",
    "replayed",
    "capturing s",
    "live tokens/s",
    "live positions",
    "peak GiB",
    "speed / plain",
    "memory / plain",
    "first loss, gradient norm",
)


def _agreement(row: Row, of_shape: Sequence[Row]) -> str:
    """Returns the first step's loss and gradient norm, marked if they differ from the unpatched run's."""
    text = f"{row['losses'][0]:.4g}, {row['grad_norms'][0]:.4g}"
    plain = _of(of_shape, provider="plain", status="ok")
    return f"{text} **DIFFERS**" if plain and differs(row, plain[0]) else text


def _live(row: Row) -> str:
    """Returns the number of positions of a step and the fraction with tokens; older rows do not have them."""
    return f"{row['live_share']:.1%} of {row['positions']:.0f}" if "live_share" in row else ""


def _run_times(row: Row) -> list[str]:
    """Returns the times of a step and of what was captured; older rows, whose steps had one batch, have a median."""
    busy, ratio, replayed = (row.get(name) for name in ("busy_ms", "busy_ratio", "bodies_replayed"))
    mean, every = (f"{row[name]:.4g}" if name in row else "" for name in ("mean_ms", "mean_all_ms"))
    return [
        mean, _ms(row), every, "" if busy is None else f"{busy:.4g}", "" if ratio is None else f"{ratio:.2f}",
        "" if replayed is None else f"{replayed:.0%}",
        f"{row['capture_seconds']:.1f}" if "capture_seconds" in row else "",
    ]  # fmt: skip


def _end_to_end_lines(rows: Sequence[Row]) -> list[list[str]]:
    of_group = _of(rows, group="end-to-end")
    lines = []
    for op, shape in _unique((r["op"], r["shape"]) for r in of_group):
        of_shape = _of(of_group, op=op, shape=shape)
        compared = ratios(of_shape)
        for row in of_shape:
            start = [op, shape, row["provider"]]
            if row["status"] != "ok":
                reason = f"{row['status']}: {row['reason']}"
                lines.append([*start, reason, *[""] * (len(E2E_COLUMNS) - len(start) - 1)])
                continue
            # Without a plain row there are no ratios.
            found = compared.get(row["provider"], (1.0, 1.0) if row["provider"] == "plain" else ())
            speed, memory = [f"{x:.3f}" for x in found] or ["", ""]
            lines.append([
                *start, *_run_times(row), f"{row['tokens_per_second']:.0f}", _live(row),
                f"{row['peak_bytes'] / (1 << 30):.3f}", speed, memory, _agreement(row, of_shape),
            ])  # fmt: skip
    return lines


def _split_heads(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence about each LM head whose vocabulary is split over ranks."""
    text = []
    for split in _of(rows, group="ops", provider="tp", status="ok"):
        for whole in _of(rows, group="ops", op=split["op"], shape=split["shape"], provider="alone", status="ok"):
            share = split["ms"]["median"] / whole["ms"]["median"]
            text += ["", f"The head of {split['shape']}, its vocabulary on {split['sizes']['devices']} devices: "
                     f"{share:.3f} of one device's time."]  # fmt: skip
    return text


KEPT_COLUMNS = ("workload", "shape", "variant", "speed / plain alone", "speed / plain", "kept")


def _kept_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Returns for steps on several ranks the speedup in a wrapper and the speedup of the same step without one."""
    of_group = _of(rows, group="end-to-end")
    speeds = {
        key: ratios(_of(of_group, op=key[0], shape=key[1])) for key in _unique((r["op"], r["shape"]) for r in of_group)
    }
    lines = []
    for (op, shape), found in speeds.items():
        name, _, wrapper = op.removesuffix("-gathered").rpartition("-")
        alone = speeds.get((f"{name}-alone", shape), {}) if wrapper != "alone" else {}
        for variant in (v for v in found if v in alone):
            before, now = alone[variant][0], found[variant][0]
            lines.append([op, shape, variant, f"{before:.3f}", f"{now:.3f}", f"{now / before:.1%}"])
    return lines


PROFILED_COLUMNS = (
    "workload", "shape", "variant", "rank", "step", "host", "preparation", "device", "communication", "of it alone",
    "idle",
)  # fmt: skip


def _profiled_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the times of each rank's device in the profiled step, in milliseconds."""
    lines = []
    for row in rows:
        ranks = [row["profiled"], *row.get("profiled_others", [])] if row.get("profiled") else []
        for rank, found in enumerate(ranks):
            names = ("step_ms", "host_ms", "preparation_ms", "device_busy_ms", "communication_ms", "exposed_ms")
            times = [*(found.get(name, 0.0) for name in names), found["step_ms"] - found["device_busy_ms"]]
            lines.append([row["op"], row["shape"], row["provider"], str(rank), *(f"{ms:.1f}" for ms in times)])
    return lines


def _markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [columns, ["---"] * len(columns), *lines]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def markdown(meta: Row, rows: Sequence[Row]) -> str:
    """Returns the whole report."""
    device, packages = meta["device"], meta["packages"]
    text = [
        f"# Benchmarks on {device['name']}, {meta['date'][:10]}",
        "",
        *(f"`{command}`\n" for command in meta.get("commands", [meta["command"]])),
        "Python " + meta["python"] + ", " + ", ".join(f"{n} {v}" for n, v in packages.items() if v != "not installed"),
        f"(not installed: {', '.join(n for n, v in packages.items() if v == 'not installed') or 'none'}); "
        f"commit {meta['commit']}; {meta['cpu']['cores']} CPU cores, {meta['cpu']['threads']} threads.",
        "",
        "Times are medians with quartiles, then the ratio to the floor of the same run. Extra memory is beyond inputs, "
        "weights and final gradients. Errors are relative to the reference in higher precision, the worst of outputs "
        "and gradients; INACCURATE is beyond three times the plain reference's own. Host: Python's time to enqueue "
        "forward, and backward (autograd's engine included).",
    ]
    copied = meta.get("copy_bytes_per_second")
    if copied:
        text += ["", f"Copy bandwidth in this run: {copied / 1e9:.0f} GB/s (read plus written)."]
    lines = _end_to_end_lines(rows)
    if lines:
        text += ["", "## End to end", "",
                 "Each step has its own lengths. Step ms: the mean of steps 11 to the last, with what was captured in "
                 "them. All steps: the mean of those after the third. The median is that of the second half. Rows with "
                 "a median alone had one batch for all steps.", "", *_markdown_table(E2E_COLUMNS, lines)]  # fmt: skip
    kept = _kept_lines(rows)
    if kept:
        text += ["", "What wrapping leaves of the gain that a variant has alone:", "",
                 *_markdown_table(KEPT_COLUMNS, kept)]  # fmt: skip
    profiled = _profiled_lines(rows)
    if profiled:
        text += ["", "More steps, profiled; ms a step. Host: until Python had asked for all of it; of it "
                 "preparation of the batch, which is no part of the times above. "
                 "Device: while any kernel ran. Communication has waiting for the other ranks in it.", "",
                 *_markdown_table(PROFILED_COLUMNS, profiled)]  # fmt: skip
    text += _split_heads(rows)
    told = [f"{r['op']} {r['shape']} {r['provider']} {r['collectives']}" for r in rows if r.get("collectives")]
    if told:
        text += ["", "Collectives on the device in one step: " + "; ".join(told) + "."]
    for group, op in _ops(rows):
        title = op if group == "ops" else f"{op}, {group.replace('scaling-', 'scaling with ')}"
        text += ["", f"## {title}", "", *_markdown_table(COLUMNS, _op_lines(rows, group, op))]
    return "\n".join(text) + "\n"


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(str(cell).replace("**", "") for cell in line))
    return table


def _brief(rows: Sequence[Row]) -> list[str]:
    """Returns the terminal's columns of one provider at one shape: medians and ratios to the floor."""
    last = rows[-1]
    line = [last["shape"], last["provider"]]
    for mode in MODES:
        found = _of(rows, mode=mode)
        ratio = f" {found[0]['floor_ratio']:.2f}x" if found and "floor_ratio" in found[0] else ""
        line.append(f"{found[0]['ms']['median']:.4g}{ratio}" if found else "")
    verdict = last.get("verdict", "")
    return [*line, _mib(last.get("extra_bytes")), "" if verdict == "ok" else verdict]


def terminal_tables(rows: Sequence[Row]) -> list[Table | str]:
    """Returns short tables for the terminal; providers that could not run are listed under each table."""
    lines = _end_to_end_lines(rows)
    found: list[Table | str] = [_table("end to end", E2E_COLUMNS, lines)] if lines else []
    for group, op in _ops(rows):
        of_op = _of(rows, group=group, op=op)
        keys = _unique((r["shape"], r["provider"]) for r in of_op if r["status"] == "ok")
        brief = [_brief(_of(of_op, shape=shape, provider=provider, status="ok")) for shape, provider in keys]
        found.append(_table(f"{op} ({group}), ms and ratio to the floor", BRIEF_COLUMNS, brief))
        reasons = _unique((r["provider"], r["status"], r["reason"]) for r in of_op if r["status"] != "ok")
        found += [f"  {provider}: {status}: {reason[:130]}" for provider, status, reason in reasons]
    return found


def comparison_table(result: Comparison) -> Table:
    """Returns a table of all compared rows, with remarks."""
    lines = [
        [key, f"{old:.4g}", f"{new:.4g}", f"{ratio:.3f}", "" if memory is None else f"{memory:.3f}", remark]
        for key, old, new, ratio, memory, remark in result.rows
    ]
    return _table("new / old", ("row", "old ms", "new ms", "time", "memory", "remark"), lines)


# ---------------------------------------------------------------------------------------------------------------------
# Plots
# ---------------------------------------------------------------------------------------------------------------------

# One colour per provider in every plot; ours stand out by weight.
_COLOURS = {
    "ours-triton": "#d62728", "ours-torch": "#ff7f0e", "ours-low-memory": "#e377c2", "ours-logprob": "#ff9896",
    "reference": "#7f7f7f", "torch.compile": "#1f77b4", "torch.nn.functional": "#17becf", "liger": "#2ca02c",
    "liger-fp32-accum": "#98df8a", "liger-chunked": "#98df8a", "liger-triton": "#2ca02c", "trl": "#9467bd",
    "cut-cross-entropy": "#8c564b", "cut-cross-entropy-unfiltered": "#c49c94", FLOOR: "black",
    "cut-cross-entropy-tuned": "#8c564b", "torch.compile-max-autotune-no-cudagraphs": "#aec7e8",
    "liger-chunked-eager": "#98df8a", "plain": "#7f7f7f", "flag": "#d62728", "flag-padded": "#ff9896",
    "flag-captured": "#9467bd", "flag-eager": "#c5b0d5", "flag-body": "#393b79",
    "flag-unshared": "#e377c2", "flag-tiled": "#ff7f0e", "flag-unbalanced": "#8c564b", "plain-flash": "#c7c7c7",
    "liger-flash": "#98df8a", "unsloth": "#bcbd22", "liger-wide": "#bcbd22", "plain-compiled": "#1f77b4",
    "flag-compiled": "#17becf",
}  # fmt: skip


# Inches. Panels are below each other, so that text is readable if a figure is as wide as a phone.
_WIDTH = 5.0


def _panels(heights: Sequence[float]) -> tuple[Any, Any]:
    """Returns a figure and pairs of axes for time and memory; both axes of a pair have one of `heights` in inches."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2 * len(heights), 1, figsize=(_WIDTH, 2 * sum(heights)), height_ratios=[h for h in heights for _ in range(2)]
    )
    return figure, axes.reshape(-1, 2)


def _bars_height(rows: Sequence[Row]) -> float:
    """Returns the height of an axis with a bar for each row, in inches."""
    return 1.0 + 0.28 * len(rows)


def plot(rows: Sequence[Row], path: Path) -> list[Path]:
    """Writes `<path>-ops.png`, `<path>-scaling.png` and `<path>-end-to-end.png`, if there are rows for them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    ok = [r for r in rows if r["status"] == "ok" and r["group"] != "end-to-end"]
    written = []
    bars = [op for op in _ops(ok) if op[0] == "ops"]
    if bars:
        written.append(_plot_bars(ok, bars, path.with_name(path.name + "-ops.png")))
    curves = [op for op in _ops(ok) if op[0] != "ops"]
    if curves:
        written.append(_plot_curves(ok, curves, path.with_name(path.name + "-scaling.png")))
    steps = _of(rows, group="end-to-end", status="ok")
    if steps:
        written.append(_plot_steps(steps, path.with_name(path.name + "-end-to-end.png")))
    return written


def _plot_bars(rows: Sequence[Row], ops: Sequence[tuple[str, str]], target: Path) -> Path:
    """Plots time (forward plus backward) and memory of every op at its largest shape."""
    shapes = [_unique(r["shape"] for r in _of(rows, group=group, op=op))[-1] for group, op in ops]
    every = [_of(rows, group=g, op=op, shape=s, mode="both") for (g, op), s in zip(ops, shapes, strict=True)]
    figure, axes = _panels([_bars_height(found) for found in every])
    for (time_axis, memory_axis), (_, op), shape, found in zip(axes, ops, shapes, every, strict=True):
        _bar(time_axis, [r for r in found if r["provider"] != FLOOR], lambda r: r["ms"]["median"])
        for floor in _of(found, provider=FLOOR):
            time_axis.axvline(floor["ms"]["median"], color="black", linestyle="--", linewidth=1)
        _bar(memory_axis, [r for r in found if r["provider"] != FLOOR], lambda r: r["extra_bytes"] / (1 << 20))
        time_axis.set_title(f"{op}\n{shape}", fontsize=10, loc="left")
        time_axis.set_xlabel("forward + backward, ms (dashed: the floor)", fontsize=9)
        memory_axis.set_xlabel("peak extra memory, MiB", fontsize=9)
    return _save(figure, target)


def _bar(axis: Any, rows: Sequence[Row], value: Any) -> None:
    names = [textwrap.fill(r["provider"], 19) for r in rows]
    values = [value(r) for r in rows]
    bars = axis.barh(names, values, color=[_COLOURS.get(r["provider"], "#bcbd22") for r in rows])
    for bar, row, number in zip(bars, rows, values, strict=True):
        flag = "" if row.get("verdict", "ok") in ("ok", "unchecked") else f" ({row['verdict']})"
        text = f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
        axis.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, f" {text}{flag}", va="center", fontsize=9)
    axis.set_xlim(0, 1.4 * max([v for v in values if math.isfinite(v)], default=1) or 1)
    axis.locator_params(axis="x", nbins=6)
    axis.invert_yaxis()
    axis.tick_params(labelsize=9)


def _plot_curves(rows: Sequence[Row], curves: Sequence[tuple[str, str]], target: Path) -> Path:
    """Plots time per token and extra memory against the size that varies."""
    from matplotlib import ticker

    figure, axes = _panels([2.8] * len(curves))
    for (time_axis, memory_axis), (group, op) in zip(axes, curves, strict=True):
        name = group.removeprefix("scaling-")
        found = _of(rows, group=group, op=op, mode="both")
        for provider in _unique(r["provider"] for r in found):
            mine = sorted(_of(found, provider=provider), key=lambda r: r["sizes"][name])
            sizes = [r["sizes"][name] for r in mine]
            style: dict[str, Any] = {
                "color": _COLOURS.get(provider, "#bcbd22"),
                "label": provider,
                "marker": "o",
                "markersize": 3,
            }
            style |= {"linestyle": "--", "marker": ""} if provider == FLOOR else {}
            style["linewidth"] = 2.4 if provider.startswith("ours") else 1.2
            tokens = [r["sizes"].get("BT", r["sizes"].get("N")) for r in mine]
            time_axis.plot(sizes, [1e3 * r["ms"]["median"] / t for r, t in zip(mine, tokens, strict=True)], **style)
            if provider != FLOOR:
                memory_axis.plot(sizes, [r["extra_bytes"] / (1 << 20) for r in mine], **style)
        time_axis.set_yscale("log")
        memory_axis.set_yscale("symlog", linthresh=1)
        for axis in (time_axis, memory_axis):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({r["sizes"][name] for r in found}))
            axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            # A logarithmic axis has hardly any labels in a range of less than a decade.
            axis.yaxis.set_major_locator(ticker.MaxNLocator(6))
            axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
            axis.minorticks_off()
            axis.set_xlabel(AXIS_LABELS.get(name, name), fontsize=9)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=9)
        time_axis.set_ylabel("forward + backward, us per token", fontsize=9)
        memory_axis.set_ylabel("peak extra memory, MiB", fontsize=9)
        fixed = ", ".join(f"{k}={v}" for k, v in found[0]["sizes"].items() if k != name)
        time_axis.set_title(f"{op}\n{fixed}", fontsize=10, loc="left")
        time_axis.legend(fontsize=9)
    return _save(figure, target)


def _plot_steps(rows: Sequence[Row], target: Path) -> Path:
    """Plots tokens per second and peak memory of training steps."""
    workloads = _unique((r["op"], r["shape"]) for r in rows)
    every = [_of(rows, op=op, shape=shape) for op, shape in workloads]
    figure, axes = _panels([_bars_height(found) for found in every])
    for (speed_axis, memory_axis), (op, shape), found in zip(axes, workloads, every, strict=True):
        _bar(speed_axis, found, lambda r: r["tokens_per_second"] / 1e3)
        _bar(memory_axis, found, lambda r: r["peak_bytes"] / (1 << 30))
        speed_axis.set_title(f"{op}\n{shape}", fontsize=10, loc="left")
        speed_axis.set_xlabel("thousand tokens per second", fontsize=9)
        memory_axis.set_xlabel("peak memory, GiB", fontsize=9)
    return _save(figure, target)


def _save(figure: Any, target: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(target, dpi=160)
    pyplot.close(figure)
    return target
