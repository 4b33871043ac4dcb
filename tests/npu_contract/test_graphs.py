"""torch_npu has what captured functions ask a device for (`npu_trainer_kernels/capture/graph.py`)."""

import inspect

import torch
import torch_npu  # adds the device

from npu_trainer_kernels import device

NPU = torch.device("npu")


def test_graphs_are_begun_ended_and_replayed_alike():
    graph = device.graph_class(NPU)
    assert graph is torch.npu.NPUGraph
    assert {"pool", "capture_error_mode"} <= set(inspect.signature(graph.capture_begin).parameters)
    for name in ("capture_end", "replay"):
        assert list(inspect.signature(getattr(graph, name)).parameters) == ["self"]
    assert device.most_graphs(NPU) == 1800


def test_attention_with_other_lengths_is_asked_for_again_at_each_update():
    """Why no body is captured (docs/capture.md): an update calls each recorded operator by itself."""
    handlers = torch_npu.npu.graphs._NPU_GRAPH_OP_HANDLERS
    served = {name for name in handlers if "." not in name and "fusion_attention" in name}
    assert served == {"npu_fusion_attention_v3", "npu_fusion_attention_grad_v3"}
    mode = next(
        each for each in vars(torch_npu.npu.graphs).values() if "update_capture_record" in getattr(each, "__dict__", {})
    )
    assert "record.op_cache_entry(*record.args, **record.kwargs)" in inspect.getsource(mode.update_capture_record)


def test_the_device_says_what_is_asked_before_a_capture():
    for name in (
        "Event", "Stream", "current_device", "current_stream", "default_generators", "get_rng_state",
        "graph_pool_handle", "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved", "stream",
        "synchronize",
    ):  # fmt: skip
        assert hasattr(torch.npu, name), name


def test_a_results_address_can_be_borrowed():
    """`DeviceRecorder.alias` makes a tensor at an address that it does not own."""
    owner = torch.arange(6.0)
    storage = owner.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), owner.device, storage.nbytes())
    alias = torch.empty(0).set_(borrowed, 2, (2, 2), (2, 1))
    owner[3] = 9
    assert alias.tolist() == [[2, 9], [4, 5]]
