"""Two gloo ranks on the CPU: a captured body gives the parameters of one that runs its own code, DDP and FSDP2."""

import pytest

from tests.distributed.test_distributed import on_two_ranks


@pytest.mark.parametrize(("wrapper", "cases"), [("ddp", 3), ("fsdp2", 2)])
def test_captured_bodies_of_ranks(tmp_path, wrapper, cases):
    """Four steps, the first of which runs the body's code, as do evaluations of full rows."""
    found = on_two_ranks("captured", tmp_path / "found.json", wrapper)
    assert len(found) == cases
    for name, case in found.items():
        for replays, reasons in case["ranks"]:
            if wrapper == "fsdp2":
                assert (replays, reasons) == (0, ["its parameters move (FSDP2)"]), name
                assert case["apart"] == 0, name
            else:
                assert (replays, reasons) == (3, []), name
                # A row that is filled up has other products: the last bit of a number below 1, at each replay.
                assert case["apart"] <= 3 * 2.0**-24, name
