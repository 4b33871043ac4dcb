"""Two gloo ranks on the CPU: captured layers under FSDP2 give the parameters of layers that run their own code."""

import pytest

from tests.distributed.test_distributed import on_two_ranks


@pytest.mark.full
def test_captured_layers_under_fsdp2(tmp_path):
    """Four steps of two layers, with an evaluation after each: the first of both runs the layers' code."""
    found = on_two_ranks("captured", tmp_path / "found.json", "fsdp2")
    assert len(found) == 4
    for name, case in found.items():
        assert case["apart"] == 0, name
        for replays, reasons in case["ranks"]:
            if "checkpointed" in name:
                assert replays == 2 * 3, name  # of the evaluations
                assert reasons == ["its parameters move (FSDP), and a checkpoint repeats it"], name
            else:
                assert replays == 2 * 2 * 3, name
                assert reasons == [], name
