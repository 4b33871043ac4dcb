"""Steps on several ranks: what they are given, what is counted of them, and how a run goes on after a failure."""

import contextvars
import sys
import threading
import types
from functools import partial

import pytest
import torch

from benchmarks import distributed, endtoend, models, ranks, report, step_cases
from benchmarks.results import environment, key_of, read
from tests import warm

CPU = torch.device("cpu")


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    for name, value in (("MASTER_ADDR", "localhost"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("wrapper", "talks", "lengths"), [("alone", False, ""), ("ddp", True, ""), ("ddp", True, "exponential")]
)
def test_the_kernels_add_no_communication(wrapper, talks, lengths, one_rank):
    """One rank; under DDP it calls the collectives that two would (FSDP2 calls none then)."""
    workload = step_cases.StepWorkload("sft", "tiny-llama", 2, 16, lengths=lengths)
    plain, ours = (ranks.train(workload, wrapper, variant, 2, CPU) for variant in ("plain", "flag"))
    assert plain["collectives"] == ours["collectives"]
    assert bool(plain["collectives"]) == talks
    assert plain["losses"] == pytest.approx(ours["losses"], rel=1e-4)
    assert plain["ran"] == {}
    # Two steps, and the step whose collectives are counted.
    assert ours["ran"]["linear_cross_entropy"] == 3
    assert len(plain["each_ms"]) == 1
    # Each has a batch of its own.
    assert len(set(plain["losses"])) == 3


@pytest.mark.full(quick="test_a_trainers_step_on_ranks")
def test_two_ranks_of_every_wrapper(tmp_path):
    """One start of the ranks. Under tp they have one batch, and half of the experts' columns each."""
    output = tmp_path / "r.json"
    arguments = [
        "--size", "tiny-qwen3-moe", "--batch", "2", "--length", "12", "--steps", "2",
        "--only", "/plain", "--only", "/flag", "--skip", "padded", "--output", str(output),
    ]  # fmt: skip
    done = warm.run_ranks(2, distributed.__name__, *arguments, output=tmp_path / "printed.txt")
    assert done.returncode == 0, done.output[-6000:]
    meta, rows = read(output)
    found = {(r["op"].removeprefix("sft-"), r["provider"]): r for r in rows}
    assert sorted(found) == sorted((wrapper, v) for wrapper in ranks.WRAPPERS for v in ("plain", "flag"))
    assert {r["status"] for r in rows} == {"ok"}, rows
    for wrapper in ranks.WRAPPERS:
        plain, ours = found[wrapper, "plain"], found[wrapper, "flag"]
        assert not endtoend.differs(ours, plain)
        assert plain["tokens"] == (24 if wrapper == "tp" else 48)
        if wrapper != "tp":
            assert plain["collectives"] == ours["collectives"]
        assert bool(plain["collectives"]) == (wrapper != "alone")
    # A batch of one's own, averaged with the other rank's; the first rank's alone.
    assert found["ddp", "plain"]["losses"][0] == found["alone", "plain"]["losses"][0]
    assert found["ddp", "plain"]["grad_norms"][0] != found["alone", "plain"]["grad_norms"][0]
    assert found["fsdp2", "plain"]["grad_norms"][0] == pytest.approx(found["ddp", "plain"]["grad_norms"][0], rel=1e-4)
    # Slices: the norm of one batch's gradient, which is the first rank's.
    assert found["tp", "plain"]["grad_norms"][0] == pytest.approx(found["alone", "plain"]["grad_norms"][0], rel=1e-4)
    # A layer's weights are gathered once a step instead of twice.
    gathers = {
        w: sum(n for name, n in found[w, "flag"]["collectives"].items() if "gather" in name) for w in ranks.WRAPPERS
    }
    layers = models.MODELS["tiny-qwen3-moe"][1]["num_hidden_layers"]
    assert gathers["fsdp2"] - gathers["fsdp2-gathered"] == layers, found["fsdp2", "flag"]["collectives"]
    kept = report.markdown(meta, rows).partition("leaves of the gain")[2]
    for wrapper in ("fsdp2", "fsdp2-gathered"):
        assert f"| sft-{wrapper} | tiny-qwen3-moe 2x2x12 | flag |" in kept


def test_a_trainers_step_on_ranks(one_rank):
    """The step whose collectives are counted is one more than those that are timed, and no part of them."""
    workload = step_cases.StepWorkload("grpo-trl", "tiny-qwen3", 4, 12, 8, lengths="exponential", group=2)
    plain, ours = (ranks.train(workload, "alone", variant, 2, CPU) for variant in ("plain", "flag"))
    assert len(plain["each_ms"]) == 1
    assert plain["tokens"] == ours["tokens"]
    assert plain["ran"] == {}
    assert ours["ran"]["linear_logprob"] >= 3
    assert not endtoend.differs({**ours, "dtype": "float32"}, plain)
    with pytest.raises(RuntimeError, match="as alone, not ddp"):
        ranks.train(workload, "ddp", "plain", 2, CPU)
    with pytest.raises(ValueError, match="not run under 'tp'"):
        ranks.train(workload, "tp", "plain", 2, CPU)


@pytest.mark.parametrize(
    ("spans", "time"),
    [
        ([], 0),
        ([(5, 9)], 4),
        ([(1, 3), (3, 4), (6, 8)], 5),
        # One in another, the same twice, one that reaches over two, and not in order.
        ([(10, 20), (12, 14), (12, 14), (19, 25), (1, 2), (24, 26)], 17),
    ],
)
def test_time_that_spans_cover(spans, time):
    assert ranks.covered(spans) == time


class _Event:
    """As Kineto hands out what it has recorded."""

    def __init__(self, name, begin, end, kind="CUDA", annotation=False):
        self.name, self.start_ns, self.duration_ns = lambda: name, lambda: begin, lambda: end - begin
        self.device_type, self.is_user_annotation = lambda: getattr(torch.autograd.DeviceType, kind), lambda: annotation


def test_what_a_device_did_in_a_step():
    """Communication beside a product, and longer than it; a range of the code's own covers all and is no work."""
    events = [
        _Event("cudaLaunchKernel", 0, 90_000_000, kind="CPU"),
        _Event("Optimizer.step#AdamW.step", 0, 90_000_000, annotation=True),
        _Event("nccl:all_gather", 0, 90_000_000, annotation=True),
        _Event("gemm", 10_000_000, 30_000_000),
        _Event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 20_000_000, 45_000_000),
        _Event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 50_000_000, 51_000_000),
        _Event("Memset (Device)", 60_000_000, 62_000_000),
        _Event("_gather_kernel", 70_000_000, 71_000_000),
        _Event("_gather_kernel", 71_000_000, 72_000_000),
        _Event("_kernel_of_others", 71_000_000, 72_000_000),
    ]
    found = ranks.what_ran(events, on_cuda=True)
    assert found["collectives"] == {"AllGather": 1, "ReduceScatter": 1}
    largest = found["profiled"].pop("largest")
    assert [(row["kernel"][:9], row["ms"], row["launches"]) for row in largest] == [
        ("ncclDevKe", 25.0, 1), ("gemm", 20.0, 1), ("Memset (D", 2.0, 1), ("_gather_k", 2.0, 2), ("ncclDevKe", 1.0, 1),
        ("_kernel_o", 1.0, 1),
    ]  # fmt: skip
    assert found["profiled"] == {
        "device_busy_ms": 40.0, "communication_ms": 26.0, "exposed_ms": 16.0, "events": 7,
    }  # fmt: skip
    called = [_Event("c10d::allreduce_", 0, 9, kind="CPU"), _Event("aten::mm", 0, 9, kind="CPU")]
    assert ranks.what_ran(called, on_cuda=False) == {"collectives": {"allreduce_": 1}}


def test_launches_of_ours_are_counted_where_they_are_launched(monkeypatch):
    """In every thread, and not by their names: the kernel of this step is TRL's, and ours do not run on its device."""
    launched: list[tuple[object, ...]] = []
    before = contextvars.ContextVar("before", default=lambda *launch: launched.append(launch))
    monkeypatch.setattr(ranks.launch_module, "_launcher", before)
    what_ran, of_trl = ranks.what_ran, [_Event("_forward_kernel", 0, 1_000_000)]
    monkeypatch.setattr(ranks, "what_ran", lambda events, on_cuda, steps: what_ran(of_trl, True, steps))
    assert ranks._profiled(lambda: None, CPU)["profiled"]["launches_of_ours"] == 0
    one = partial(ranks.launch_module.launch, "kernel", (1,), (), {})

    def step():
        one()
        thread = threading.Thread(target=one)
        thread.start()
        thread.join()

    assert ranks._profiled(step, CPU)["profiled"]["launches_of_ours"] == 2 == len(launched)
    assert ranks.launch_module._launcher is before


def test_clipping_is_torchs():
    parameters = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(3)]
    for p in parameters[:2]:
        p.grad = 3 * torch.randn(5, 3)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, p in zip(copies[:2], parameters[:2], strict=True):
        copy.grad = p.grad.clone()
    torch.testing.assert_close(
        ranks._clip([parameters[:1], parameters[1:]], 1.0), torch.nn.utils.clip_grad_norm_(copies, 1.0)
    )
    for p, copy in zip(parameters[:2], copies[:2], strict=True):
        torch.testing.assert_close(p.grad, copy.grad)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_every_row_of_the_plan_is_named_once(kind, one_rank):
    rows = distributed.rows_of(distributed.plan(kind))
    keys = [key_of(distributed._row(*row)) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {wrapper for _, wrapper, _ in rows} == set(ranks.WRAPPERS)
    assert {workload.name for workload, _, _ in rows} == {"sft", "grpo-trl"}
    # Nothing is measured without what it is compared with.
    assert {row[:2] for row in rows} == {row[:2] for row in rows if row[2] == "plain"}


def _on_two_ranks(rank):
    """Calls it with each rank's number, on threads of their own."""
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_ranks_profile_is_kept():
    store, found = torch.distributed.HashStore(), [{}, {}]

    def rank(number):
        together = distributed._Together(store, number, 2)
        found[number] = distributed._measured({}, together, lambda: {"profiled": {"host_ms": 10.0 + number}})

    _on_two_ranks(rank)
    assert found == [{"profiled": {"host_ms": 10.0}, "profiled_others": [{"host_ms": 11.0}]}] * 2


def test_a_failure_of_one_rank_is_the_row_of_all():
    store, found = torch.distributed.HashStore(), [{}, {}]

    def rank(number):
        def step():
            if number:
                raise RuntimeError("out of memory\nsecond line")
            return {"ms": 1.0}

        together = distributed._Together(store, number, 2)
        assert together.first_says(number == 0)
        found[number] = distributed._measured({"op": "x", "status": "ok"}, together, step)
        assert distributed._measured({"status": "ok"}, together, lambda: {"ms": 2.0}) == {"status": "ok", "ms": 2.0}
        found[number]["went on"] = True

    _on_two_ranks(rank)
    for row in found:
        assert row == {"op": "x", "status": "error", "reason": "RuntimeError: out of memory", "went on": True}


@pytest.mark.parametrize(
    "workload",
    [
        step_cases.StepWorkload("sft", "tiny-llama", 2, 8),
        step_cases.StepWorkload("grpo-trl", "tiny-llama", 2, 8, 4, group=2),
    ],
    ids=lambda workload: workload.name,
)
def test_what_liger_exchanges_is_there_again(workload, one_rank, monkeypatch):
    module = sys.modules[models.model_class(workload.size).__module__]
    before = dict(vars(module))

    def apply(model, **settings):
        module.LlamaRMSNorm = module.added = torch.nn.Identity

    patch = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patch._apply_liger_kernel_to_instance = apply
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, patch.__name__, patch)
    ranks.train(workload, "alone", "liger", 2, CPU)
    assert vars(module) == before


def test_what_is_not_there_is_absent(one_rank, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    together = distributed._Together(torch.distributed.HashStore(), 0, 1)
    workload = step_cases.StepWorkload("sft", "tiny-llama", 2, 8)
    row = distributed._measured({}, together, lambda: ranks.train(workload, "alone", "liger", 2, CPU))
    assert row["status"] == "absent"
    assert "liger_kernel" in row["reason"]


def test_a_head_on_one_device(one_rank):
    row = {**distributed._head_row({"BT": 8, "H": 8, "V": 30}, "float32", "alone")}
    found = ranks.time_head(row["sizes"], torch.float32, "alone", CPU)
    assert found["verdict"] == "unchecked"
    assert found["collectives"] == {}
    split = {**row, **found, "provider": "tp", "ms": {**found["ms"], "median": found["ms"]["median"] / 2}}
    did = {"step_ms": 90.0, "host_ms": 70.0, "device_busy_ms": 38.0, "communication_ms": 26.0, "exposed_ms": 16.0}
    others = [{**did, "host_ms": 60.0}]
    rows = [{**row, **found}, {**split, "profiled": did, "profiled_others": others}]
    text = report.markdown(environment(CPU, []), rows)
    assert text.count("| BT=8 H=8 V=30 | tp | 0 | 90.0 | 70.0 | 0.0 | 38.0 | 26.0 | 16.0 | 52.0 |") == 1
    assert text.count("| BT=8 H=8 V=30 | tp | 1 | 90.0 | 60.0 | 0.0 | 38.0 | 26.0 | 16.0 | 52.0 |") == 1
    assert "The head of BT=8 H=8 V=30, its vocabulary on 1 devices: 0.500 of one device's time." in text


def test_a_head_that_is_shared_out_is_held_to_the_whole_one(one_rank, monkeypatch):
    """One rank, whose slice is the whole vocabulary."""
    sizes = {"BT": 8, "H": 8, "V": 30}
    found = ranks.time_head(sizes, torch.float32, "tp", CPU)
    assert set(found["errors"]) == {"out0", "dx", "dweight"}
    assert found["verdict"] == "ok"

    def wrong(tensor, *args, original=ranks.distribute_tensor):
        return original(tensor * 1.01, *args)

    monkeypatch.setattr(ranks, "distribute_tensor", wrong)
    assert ranks.time_head(sizes, torch.float32, "tp", CPU)["verdict"] == "inaccurate"
