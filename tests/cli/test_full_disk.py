"""Commands that write files, on a disk that is full: a line that says what to do, and an exit code."""

import errno
import io
import json
import zipfile

import pytest

from benchmarks import cli as runner
from benchmarks.results import Results
from npu_trainer_kernels import fit
from npu_trainer_kernels.cli import _prove_archive, _tune, main
from npu_trainer_kernels.cli.output import Output
from npu_trainer_kernels.evidence import tuned
from npu_trainer_kernels.fit import PARTS, Prediction
from tests.cli.test_bench import ONE
from tests.cli.test_fit import CONFIG

NO_SPACE = "No space left on device"


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, NO_SPACE, "somewhere")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    return str(tmp_path)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_bench(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setattr(Results, "add", full)
    assert main([*ONE, "--output", str(tmp_path), *options]) == 1
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]
    assert line == (
        f"npu-kernels bench: nothing could be written to somewhere: {NO_SPACE}; make room there, or name another "
        "folder with --output; the same command goes on from the rows that are written"
    )
    assert "Traceback" not in captured.err
    if options:
        assert json.loads(captured.out)["error"] == line


def test_bench_into_a_file(tmp_path, capsys):
    (tmp_path / "results").write_text("")
    assert main([*ONE, "--output", str(tmp_path / "results")]) == 1
    assert "make that possible, or name another folder with --output" in capsys.readouterr().err


def test_bench_raises_what_is_not_about_its_results(monkeypatch):
    def offline(*args):
        raise OSError(errno.ECONNREFUSED, "no answer")

    monkeypatch.setattr(runner, "main", offline)
    with pytest.raises(OSError, match="no answer"):
        main([*ONE])


def test_bench_is_stopped_with_a_line(monkeypatch, capsys):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "main", stop)
    assert main([*ONE]) == 130
    assert capsys.readouterr().err.startswith("npu-kernels bench: stopped; the same command goes on")


@pytest.mark.parametrize("memory", ["80", "2.0001"])
def test_the_figure_of_fit(model, tmp_path, monkeypatch, capsys, memory):
    from matplotlib.figure import Figure

    monkeypatch.setattr(fit, "predict", lambda config, setup: Prediction(dict.fromkeys(PARTS, setup.batch << 20)))
    monkeypatch.setattr(Figure, "savefig", full)
    figure = ["--figure", str(tmp_path / "fit.png")]
    assert main(["fit", "--model", model, "--memory", memory, *figure, "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["problem"] == (
        f"--figure: nothing could be written to somewhere: {NO_SPACE}; make room there, or name another file"
    )
    assert found["problem"] in captured.err
    assert found["fits"] == (memory == "80")  # what was predicted is still said


def test_the_store_of_tune(monkeypatch, capsys):
    monkeypatch.setattr(_tune, "results", lambda outcomes: {"rms_norm": []})
    monkeypatch.setattr(tuned, "store", full)
    with Output(False) as output:
        assert _tune._finish([], [], "cpu", "cpu", False, False, output) == 1
    out = capsys.readouterr().out
    assert "For cpu: nothing was stored\n" in out
    assert f"{NO_SPACE}; make room there, or set NPU_KERNELS_CACHE to another folder, and tune again\n" in out


def test_the_archive_of_prove(tmp_path, monkeypatch):
    """It leaves no part of an archive behind, which would take the last room."""
    found = {"meta": {"device": {"name": "NVIDIA H200"}}, "tuned": {}}
    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "writestr", full)
        with pytest.raises(OSError, match=NO_SPACE):
            _prove_archive.write(tmp_path, found, "report")
    assert list(tmp_path.iterdir()) == []
    assert _prove_archive.write(tmp_path, found, "report").name == "prove-nvidia-h200.zip"


class Full(io.RawIOBase):
    """A file on a disk that stays full."""

    def writable(self):
        return True

    write = full


def test_the_journal_of_prove_is_closed_on_a_disk_that_stays_full(tmp_path):
    journal = _prove_archive.Journal(tmp_path)
    journal._stream.close()
    journal._stream = io.TextIOWrapper(io.BufferedWriter(Full()), encoding="utf-8")
    with pytest.raises(OSError, match=NO_SPACE):
        journal.add({"part": "steps"})
    journal.close()
    assert journal._stream.closed
