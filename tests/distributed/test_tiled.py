"""Two gloo ranks on the CPU: MLPs over slices, under DDP and FSDP2, give the parameters of a run without."""

import pytest

from tests.distributed.test_distributed import on_two_ranks


@pytest.mark.full("fsdp2")
@pytest.mark.parametrize(
    ("wrappers", "cases"), [(("ddp",), 3), (("fsdp2", "fsdp2, MLPs", "fsdp2, projections"), 3 + 2 + 1)],
    ids=["ddp", "fsdp2"],
)  # fmt: skip
def test_mlps_over_slices(tmp_path, wrappers, cases):
    """Two layers and two steps, a reentrant checkpoint's layers twice."""
    found = on_two_ranks("tiled", tmp_path / "found.json", *wrappers)
    assert len(found) == cases
    for name, case in found.items():
        calls = 8 if name.endswith("True") else 4
        # DDP tells of each parameter's gradient: once a step.
        came = [2] if name.startswith("ddp") else []
        expected = [calls, {}, came]
        if name.startswith("fsdp2, projections"):
            expected = [0, {"its parameters are sharded while it runs": 8}, came]
        assert case["ranks"] == [expected] * 2, name
