"""The first table of the performance page is what the results file says that it names."""

import json

import pytest

from benchmarks import cli, tables


def test_the_page_says_what_its_file_says():
    file, table = tables.source_of()
    assert table == tables.table(file), f"python -m benchmarks --tables {file.relative_to(tables.ROOT)}"


def _row(provider, ms, gib, **changes):
    sizes = {"batch": 8, "length": 4096, "prompt": 128, "least": 0, "lengths": "exponential", "group": 2, "lora": 0}
    return {
        "group": "end-to-end", "op": "grpo-trl", "shape": "qwen3-0.6b 8x(128+..4096 exponential), 2 a prompt",
        "sizes": sizes, "provider": provider, "status": "ok", "ms": {"median": ms}, "peak_bytes": gib * 2**30,
        "tokens_per_second": 12e6 / ms, "live_share": 0.372, **changes,
    }  # fmt: skip


ROWS = [
    _row("plain", 1000.0, 8), _row("flag", 250.0, 6), _row("flag-padded", 800.0, 7), _row("liger", 500.0, 7.5),
    _row("plain-flash", 1.0, 0, status="absent"),
    # One prompt for all rows, and no row of plain: nothing to compare with.
    _row("flag", 1.0, 1, shape="other"),
]  # fmt: skip


def test_measured_rows_fill_the_table(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    file = folder / "new.json"
    meta = {"format": 1, "device": {"name": "a card"}, "packages": {"torch": "2.11", "triton": "3.6"}}
    file.write_text(json.dumps({"meta": meta, "rows": ROWS}))
    page, before = tmp_path / "performance.md", tables.PAGE.read_text()
    page.write_text(before)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGE", page)
    assert cli.main(["--tables", str(file)]) == 0
    text = page.read_text()
    what = "GRPO update, TRL, Qwen3 of 0.6B, 8 x (up to 128 + up to 4096) tokens | 37%"
    assert "| plain | with the flag | padding computed | Liger-Kernel |" in text
    assert f"| {what} | tokens/s | 12.0k | 48.0k (4.00 x) | 15.0k (1.25 x) | 24.0k (2.00 x) |" in text
    assert "a card, torch 2.11, Triton 3.6: `benchmarks/results/new.json`." in text
    assert "other" not in {line.partition(" ")[0] for line in text.splitlines()}
    # What stands around the table stays.
    assert text.partition(tables._BEGIN)[0] == before.partition(tables._BEGIN)[0]
    assert text.partition(tables._END)[2] == before.partition(tables._END)[2]
    assert tables.source_of()[0] == file


def test_flash_attention_has_columns_once_it_is_measured():
    rows = [*ROWS, _row("plain-flash", 400.0, 7), _row("liger-flash", 320.0, 6.5)]
    # A run that lacks it leaves its cells empty.
    rows += [_row(name, 500.0, 5, shape="qwen3-4b other") for name in ("plain", "flag")]
    table = tables._table(rows)
    assert "| plain | plain, flash attention | with the flag |" in table[0]
    assert table[0].endswith("| Liger-Kernel | Liger-Kernel, flash attention |")
    assert "| tokens/s | 12.0k | 30.0k (2.50 x) | 48.0k (4.00 x) |" in table[2]
    assert table[2].endswith("| 24.0k (2.00 x) | 37.5k (3.12 x) |")
    assert "| tokens/s | 24.0k |  | 24.0k (1.00 x) |" in table[4]


def test_a_file_that_readers_do_not_have_is_refused(tmp_path, capsys):
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["--tables", str(tmp_path / "r.json")])
    assert "benchmarks/results/" in capsys.readouterr().err


def test_a_file_without_steps_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(
            ["--tables", str(tables.ROOT / "benchmarks" / "results" / "2026-11-22-nvidia-h200-fifth-round-ops.json")]
        )
    assert "no training step" in capsys.readouterr().err
