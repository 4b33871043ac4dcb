"""`npu-kernels run` in front of DeepSpeed's own launcher, two ranks on the CPU in place of NPUs."""

import socket

from tests.cli.test_run_commands import SCRIPT, STEPS
from tests.cli.training import check


def test_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:  # the launcher takes a port by number alone
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", port, "train.py", *STEPS]
    check(tmp_path, command, "--output_dir")
