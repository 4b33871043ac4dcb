"""Two gloo ranks on the CPU: captured layers give the parameters of layers that run their own code, DDP and FSDP2."""

import pytest

from tests.distributed.test_distributed import on_two_ranks

TAKEN = "hooks around it take the tensors that it saves for backward (a checkpoint, or offloading)"


@pytest.mark.full("fsdp2")
@pytest.mark.parametrize(("wrapper", "cases"), [("ddp", 3), ("fsdp2", 8)])
def test_captured_layers_of_ranks(tmp_path, wrapper, cases):
    """Four steps of two layers, with an evaluation after each: the first of both runs the layers' code."""
    found = on_two_ranks("captured", tmp_path / "found.json", wrapper)
    assert len(found) == cases
    for name, case in found.items():
        assert case["apart"] == 0, name
        for replays, reasons in case["ranks"]:
            if name == "fsdp2, checkpointed by torch":
                # Its wrapper repeats a forward in training; there is none in the evaluations.
                assert replays == 2 * 3, name
                assert reasons == [TAKEN], name
            else:
                # A checkpoint repeats the forward.
                assert replays == (3 if "checkpointed" in name else 2) * 2 * 3, name
                assert reasons == [], name
