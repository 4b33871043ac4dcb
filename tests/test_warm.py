"""Programs in processes that find the imports done: what they are given, and how they end."""

import json
import os

from tests import warm

SCRIPT = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ.get("TRITON_INTERPRET"), os.environ.get("GIVEN"), os.getcwd(),
                  "transformers.trainer" in sys.modules, "npu_trainer_kernels" in sys.modules]))
if sys.argv[1] == "waits" and os.environ.get("RANK") != "1":
    import time
    time.sleep(60)
sys.exit({"well": None, "badly": "it said why", "waits": 3}[sys.argv[1]])
"""


def start(where, how, function=warm.run, **more):
    (where / "script.py").write_text(SCRIPT)
    return function(str(where / "script.py"), how, output=where / f"{how}.txt", **more)


def test_a_program_has_what_it_is_given_and_nothing_of_ours(tmp_path):
    done = start(tmp_path, "well", folder=tmp_path, GIVEN="yes")
    assert done.returncode == 0, done.output
    assert json.loads(done.output) == [["well"], None, "yes", str(tmp_path), True, False]
    assert "GIVEN" not in os.environ


def test_a_program_that_fails_or_stands_still_says_so(tmp_path):
    done = start(tmp_path, "badly", folder=tmp_path)
    assert (done.returncode, "it said why" in done.output) == (1, True)
    assert start(tmp_path, "waits", folder=tmp_path, timeout=1).returncode == -9


def test_a_rank_that_fails_ends_the_others(tmp_path):
    done = start(tmp_path, "waits", lambda *args, **more: warm.run_ranks(2, *args, **more), timeout=50)
    assert done.returncode == 3
