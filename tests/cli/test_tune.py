"""`npu-kernels tune`: what wins, what is stored, what is never chosen. Times are made up: none is tested."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from npu_trainer_kernels import apply_npu_kernels, backends, descriptions, tiling, timing
from npu_trainer_kernels.cli import _tune, main
from npu_trainer_kernels.cli._selfcheck import CHECKED, CHECKED_TOKENS
from npu_trainer_kernels.device import ASCEND_CHIPS, DeviceSpec, spec, use_spec
from npu_trainer_kernels.evidence import tuned
from npu_trainer_kernels.evidence.tuned import Variation
from npu_trainer_kernels.ops.launch import KernelError, use_launcher
from npu_trainer_kernels.timing import Summary

CONFIG = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64,
    "intermediate_size": 176, "vocab_size": 331, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CPU = torch.device("cpu")
CPU_SPEC = spec(CPU)
# The forms of layers with a state.
OF_STATES = {"causal_conv1d", "gated_delta_rule"}
NPU = ASCEND_CHIPS["Ascend910B4"]
H200 = DeviceSpec("cuda", "NVIDIA H200", 132, 256 << 10, 141 << 30)


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NPU_KERNELS_TUNED")
    tuned.forget()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    yield str(tmp_path)
    tuned.forget()


@pytest.fixture
def times(monkeypatch):
    """Milliseconds that every measurement of ours, and of plain PyTorch, gives."""
    made_up = {"ours": 1.0, "plain": 2.0}
    references = {op.reference for op in descriptions.FORMS.values()}

    def measure(fn, sets, mode, where, settings, cold):
        ms = made_up["plain" if fn in references else "ours"]
        sets[0].backward(fn(sets[0].tensors))
        return Summary(ms, ms, ms, ms, 1), None

    monkeypatch.setattr(timing, "measure", measure)
    return made_up


@pytest.fixture
def two_ops(monkeypatch):
    """For what has nothing to do with which ops there are: all of them take seconds."""
    monkeypatch.setattr(descriptions, "FORM_NAMES", ("rms_norm", "swiglu"))


def run(model, capsys, *options):
    code = main(["tune", "--model", model, "--tokens", "128", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def winners(found):
    """By op, with the most tokens and with the least."""
    return {op: [at["winner"] for at in of_op] for op, of_op in found["ops"].items()}


def stored(op):
    return tuned.machines()["cpu"].ops[op]


def test_winners_are_stored_for_the_models_shapes(model, times, capsys):
    code, found = run(model, capsys)
    assert code == 0
    assert set(found["ops"]) == set(descriptions.FORMS) - OF_STATES  # it has none
    assert [at["shape"] for at in found["ops"]["swiglu"]] == ["N=128 I=176", "N=16 I=176"]
    assert set(map(tuple, winners(found).values())) == {("torch", "torch")}
    assert set(tuned.machines()["cpu"].ops) == set(backends.OPS) - OF_STATES
    (entry,) = stored("linear_cross_entropy")
    assert (entry.tokens, entry.sizes, entry.dtype) == ((16, 128), (("H", 64), ("V", 331)), "float32")
    assert found["results"]["linear_cross_entropy"] == [entry.as_json()]


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (
            {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "vocab_size": 97},
            {"swiglu", "swiglu_linear", "geglu", "moe_experts", *OF_STATES},
        ),
        (
            {"model_type": "mamba", "hidden_size": 32, "vocab_size": 97},
            {
                "moe_experts",
                "linear_rms_norm",
                "rope",
                "rope_by_turns",
                "varlen_attention",
                "decode_attention",
                *OF_STATES,
            },
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_what_a_model_has_no_sizes_for_is_left_out_and_named(tmp_path, monkeypatch, capsys, config, left_out):
    monkeypatch.setattr(_tune, "tune_op", lambda work, *args: _tune.Outcome(work))
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, found = run(str(tmp_path), capsys)
    assert set(found["left_out"]) == left_out
    assert set(found["ops"]) == set(descriptions.FORMS) - left_out


def test_an_op_that_loses_is_left_to_the_model_with_both_times(model, times, two_ops, capsys):
    times["ours"] = 3.0
    _, found = run(model, capsys)
    assert winners(found)["rms_norm"] == ["plain", "plain"]
    (entry,) = stored("rms_norm")
    assert entry.plain_wins
    assert "torch 3 ms, plain PyTorch 2 ms, 16 to 128 tokens, H=64 float32" in str(entry)
    times["ours"] = 2.02
    _, found = run(model, capsys)
    assert winners(found)["rms_norm"] == ["torch", "torch"]


def test_where_the_ends_differ_nothing_is_said_of_what_lies_between(model, times, two_ops, capsys, monkeypatch):
    measure = timing.measure

    def slow_with_few(fn, sets, *args, **kwargs):
        x = sets[0].tensors.get("x")
        times["ours"] = 3.0 if x is not None and len(x) == 16 else 1.0
        return measure(fn, sets, *args, **kwargs)

    monkeypatch.setattr(timing, "measure", slow_with_few)
    run(model, capsys)
    assert {entry.tokens: entry.plain_wins for entry in stored("rms_norm")} == {(16, 16): True, (128, 128): False}


def test_models_and_tokens_stay_side_by_side(model, times, two_ops, capsys, tmp_path):
    run(model, capsys)
    run(model, capsys, "--tokens", "1024", "--dtype", "bf16")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}))
    run(str(other), capsys)
    assert {(e.dtype, *e.sizes, e.tokens) for e in stored("rms_norm")} == {
        ("float32", ("H", 64), (16, 128)), ("bfloat16", ("H", 64), (128, 1024)), ("float32", ("H", 32), (16, 128)),
    }  # fmt: skip


def test_what_was_tuned_on_a_tiny_model_does_no_harm_to_a_large_one(model, times, capsys):
    times["ours"] = 3.0
    run(model, capsys)
    large = LlamaForCausalLM(
        LlamaConfig(**{**CONFIG, "vocab_size": 128256, "hidden_size": 128, "num_hidden_layers": 1})
    )
    with apply_npu_kernels(large) as kernels:
        report = kernels.report()
    heads = {"linear_cross_entropy", "linear_logprob"}
    assert {r.op for r in report.replaced} == {"rms_norm", "add_rms_norm", "varlen_attention"} | heads
    assert "measured" not in str(report)


def test_the_head_keeps_its_memory(model, times, capsys):
    """What the head is for does not show in a time."""
    times["ours"] = 3.0
    _, found = run(model, capsys)
    for op in ("linear_cross_entropy", "linear_logprob", "linear_divergence", "fused_linear_grpo_loss"):
        assert winners(found)[op] == ["torch", "torch"]
    assert winners(found)["embedding"] == ["plain", "plain"]


def test_a_wrong_backend_never_wins(model, times, two_ops, capsys, monkeypatch):
    op = descriptions.FORMS["rms_norm"]
    wrong = dataclasses.replace(op, ours=lambda backend: lambda t: 1.01 * op.ours(backend)(t))
    monkeypatch.setitem(descriptions.FORMS, "rms_norm", wrong)
    code, found = run(model, capsys)
    assert code == 1
    assert "result 0" in found["ops"]["rms_norm"][0]["problems"]["torch"]
    assert winners(found)["rms_norm"] == [None, None]
    assert "rms_norm" not in tuned.machines()["cpu"].ops


def test_plain_pytorch_out_of_memory_is_no_failure(model, times, capsys, monkeypatch):
    reference = descriptions.Workload.reference.fget

    def of(work):
        # The small check still has its reference, the measurement none.
        return too_large if work.op == "linear_logprob" and work.sizes["V"] == 331 else reference(work)

    def too_large(tensors):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(descriptions, "FORM_NAMES", ("linear_logprob",))
    monkeypatch.setattr(descriptions.Workload, "reference", property(of))
    code, found = run(model, capsys)
    assert code == 0
    assert winners(found)["linear_logprob"] == ["torch", "torch"]
    assert "OutOfMemoryError" in found["ops"]["linear_logprob"][0]["problems"]["plain"]


def test_inputs_that_do_not_fit_stop_no_other_op(model, times, capsys, monkeypatch):
    """As all experts of a model that is trained on several devices."""
    inputs = descriptions.Workload.inputs

    def too_large(work, where):
        if work.op == "moe_experts" and work.sizes["H"] == 64:
            raise torch.OutOfMemoryError("no room\nmore of it")
        return inputs(work, where)

    monkeypatch.setattr(descriptions, "FORM_NAMES", ("moe_experts", "rope"))
    monkeypatch.setattr(descriptions.Workload, "inputs", too_large)
    code, found = run(model, capsys)
    assert code == 0
    assert [op["problems"] for op in found["ops"]["moe_experts"]] == [{"inputs": "OutOfMemoryError: no room"}] * 2
    assert (list(found["results"]), found["stopped"]) == (["rope"], False)


def stop_at(monkeypatch, op, error):
    tune_op = _tune.tune_op

    def stopping(work, *args):
        if work.op == op:
            raise error
        return tune_op(work, *args)

    monkeypatch.setattr(_tune, "tune_op", stopping)


def test_ctrl_c_keeps_what_was_measured(model, times, capsys, monkeypatch):
    stop_at(monkeypatch, "add_rms_norm", KeyboardInterrupt())
    code, found = run(model, capsys)
    assert (code, found["stopped"]) == (130, True)
    assert set(found["ops"]) == {"rms_norm", "linear_rms_norm"}
    assert set(tuned.machines()["cpu"].ops) == {"rms_norm"}
    assert stored("rms_norm")[0].tokens == (16, 128)


def test_an_error_on_the_way_hides_nothing(model, times, capsys, monkeypatch):
    stop_at(monkeypatch, "add_rms_norm", RuntimeError("the device was lost"))
    with pytest.raises(RuntimeError, match="the device was lost"):
        main(["tune", "--model", model, "--tokens", "128"])
    assert "linear_rms_norm" in capsys.readouterr().out
    assert set(tuned.machines()["cpu"].ops) == {"rms_norm"}


def test_what_cannot_be_stored_is_shown(model, times, capsys, monkeypatch):
    def full(*args):
        raise OSError("no space left on the device")

    monkeypatch.setattr(tuned, "store", full)
    assert main(["tune", "--model", model, "--tokens", "128"]) == 1
    out = capsys.readouterr().out
    assert "fused_linear_grpo_loss" in out
    assert "no space left on the device" in out


def test_a_place_that_cannot_be_written_is_known_before_anything_is_measured(
    model, times, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(_tune, "tune_op", lambda *args: pytest.fail("measured"))
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(tmp_path / "a file" / "below"))
    assert main(["tune", "--model", model]) == 2
    assert "nothing could be stored" in capsys.readouterr().err


def test_a_dry_run_stores_nothing(model, times, two_ops, capsys):
    code, found = run(model, capsys, "--dry-run")
    assert code == 0
    assert found["stored"] is None
    assert tuned.machines() == {}


@pytest.mark.full(quick="test_a_dry_run_stores_nothing")
def test_it_measures_for_real(model, capsys):
    assert main(["tune", "--model", model, "--tokens", "16", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "from now on" in captured.out
    assert "nothing was stored" in captured.out
    assert f"[1/{2 * (len(descriptions.FORMS) - len(OF_STATES))}] tuning rms_norm, 16 tokens\n" in captured.err


class Queue:
    """A GPU that does one thing after another. The host's clock and the time when all is done are in milliseconds."""

    def __init__(self):
        self.host = self.done = 0.0

    def ask(self, host, device):
        self.host += host
        self.done = max(self.done, self.host) + device

    def Event(self, enable_timing):
        return Moment(self)


class Moment:
    def __init__(self, queue):
        self.queue = queue

    def record(self):
        self.at = max(self.queue.host, self.queue.done)

    def synchronize(self):
        self.queue.host = max(self.queue.host, self.at)

    def elapsed_time(self, other):
        return other.at - self.at


class FakeWork:
    """An op that is quick on the device and slow to ask for, beside plain PyTorch, of which the opposite holds."""

    def __init__(self, queue):
        self.queue = queue

    def ours(self, backend):
        return lambda tensors: self.queue.ask(host=0.4, device=0.01)

    def reference(self, tensors):
        self.queue.ask(host=0.02, device=0.1)

    def inputs(self, where):
        return SimpleNamespace(tensors={}, bytes=lambda: 1 << 20, drop_grads=lambda: None, backward=lambda out: None)


def test_a_backend_wins_by_the_devices_time_which_is_all_that_a_captured_layer_takes(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(torch, "get_device_module", lambda where: queue)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.ask(host=0.01, device=cycles / 2e6))
    time = _tune._timer(FakeWork(queue), torch.device("cuda"), timing.QUICK)
    assert time("torch").median == pytest.approx(0.01)
    assert time("plain").median == pytest.approx(0.1)


def test_tiles_are_tried_one_by_one_and_the_faster_kept(device):
    """The op's time is what the tiles that it asked for say: half a block of one, twice the block of the other."""
    forward, backward = (64, 3), (64, 5)
    best_of = {forward: 32, backward: 128}
    asked = []

    def time():
        sizes = {key: tiling.swiglu_block(4, key[1], CPU_SPEC).size for key in (forward, backward)}
        asked.append(tuple(sizes.values()))
        ms = 1.0 + sum(abs(size - best_of[key]) for key, size in sizes.items())
        return Summary(ms, ms, ms, ms, 1)

    try:
        kept, best, too_large = _tune.tune_tiles(time(), time, device)
        assert too_large == []
        assert kept == {("swiglu_block", (4, 3)): Variation(size=-1), ("swiglu_block", (4, 5)): Variation(size=1)}
        assert best.median == 1.0
        # No tile is tried twice, and what is kept stays for the next one.
        assert len(asked) == 2 + 2 + 2
        assert asked[-1][0] == 32
    finally:
        for moved in (3, 5):
            tiling.try_variation("swiglu_block", (4, moved, CPU_SPEC), None)


def test_a_tile_that_does_not_compile_is_passed_over(device):
    def time():
        if tiling.swiglu_block(4, 3, CPU_SPEC).size != 64:
            raise KernelError("out of registers")
        return Summary(1.0, 1.0, 1.0, 1.0, 1)

    kept, best, too_large = _tune.tune_tiles(time(), time, device)
    assert (kept, best) == ({("swiglu_block", (4, 3)): Variation()}, time())
    assert too_large == [
        f"swiglu_block(4, 3), {size} the size, the same warps: out of registers" for size in ("half", "twice")
    ]


def test_on_an_npu_larger_and_smaller_tiles_are_tried_and_what_does_not_fit_is_passed_over():
    """The formula's is chosen by overlap: twice the rows of one tile are faster, of the other they do not fit."""
    forward, backward = ((1024, 2, True, False, False), (1024, 2, False, False))

    def rows():
        return tiling.norm_forward_tile(*forward, NPU).rows, tiling.norm_backward_tile(*backward, NPU).rows

    def time():
        forward_rows, backward_rows = rows()
        if backward_rows > formula[1]:
            raise KernelError("ub overflow, requires 2000000 bits while 1572864 bits available\nmore of it")
        ms = 10.0 - forward_rows / 10 + backward_rows / 10
        return Summary(ms, ms, ms, ms, 1)

    try:
        with use_spec(NPU):
            formula = rows()
            kept, _, too_large = _tune.tune_tiles(time(), time, torch.device("cpu"))
            assert rows() == (2 * formula[0], formula[1] // 2)
        assert kept == {("norm_forward_tile", forward): Variation(size=1),
                        ("norm_backward_tile", backward): Variation(size=-1)}  # fmt: skip
        assert too_large == [
            "norm_backward_tile(1024, 2, False, False), twice the size, the same warps: "
            "ub overflow, requires 2000000 bits while 1572864 bits available"
        ]
    finally:
        for name, args in (("norm_forward_tile", forward), ("norm_backward_tile", backward)):
            tiling.try_variation(name, (*args, NPU), None)


# A larger one fits, a smaller one is slower: rows, fold, block or columns, by formula and doubled.
ON_NPUS = {
    "statistics_tile": ((128256, 2, 1), "fold"),
    "gradient_tile": ((128256, 2, False), "block"),
    "divergence_tile": ((128256, 2), "block"),
    "rope_tile": ((64, 0, 2, False), "rows"),
    "embedding_tile": ((2048,), "rows"),
    "expert_gate_tile": ((768, 2, 1, 0, 0, 0), "rows"),
    "expert_rows_tile": ((12288, 2), "cols"),
}


@pytest.mark.parametrize("name", ON_NPUS)
def test_on_an_npu_alone_tiles_of_head_rotation_embedding_and_experts_are_tried(name):
    args, size = ON_NPUS[name]
    asked = []

    def time(spec):
        asked.append(getattr(getattr(tiling, name)(*args, spec), size))
        return Summary(1.0 / asked[-1], 1.0, 1.0 / asked[-1], 1.0 / asked[-1], 1)

    try:
        with use_spec(NPU):
            kept, _, _ = _tune.tune_tiles(time(NPU), lambda: time(NPU), CPU)
        formula = asked[0]
        assert kept == {(name, args): Variation(size=1)}
        assert asked[2:] == [formula // 2, 2 * formula]
        assert getattr(getattr(tiling, name)(*args, NPU), size) == 2 * formula
        assert _tune.tune_tiles(time(H200), lambda: time(H200), CPU)[0] == {}
    finally:
        tiling.try_variation(name, (*args, NPU), None)


@pytest.mark.parametrize(
    ("where", "asked"),
    [(NPU, set(tiling.TUNABLE)), (H200, set(tiling.TUNABLE) - set(ON_NPUS))],
    ids=["on an NPU", "on a GPU"],
)
def test_every_tile_that_may_be_varied_belongs_to_an_op_that_tune_times(where, asked):
    """A variation that no workload asks for could be neither measured nor stored."""
    tiling.forget_tiles()
    with use_spec(where), use_launcher(lambda *launch: None):
        for work in descriptions.of_model(CHECKED, CHECKED_TOKENS, "bfloat16"):
            inputs = work.inputs(CPU)
            inputs.backward(work.ours(backends.strict_override("triton"))(inputs.tensors))
    assert {name for name, _ in tiling.asked_tiles()} == asked


def test_what_was_kept_at_the_most_tokens_is_kept_at_the_least():
    """Tiles are tried once: what two ops, or two numbers of tokens, ask for alike is settled by the first."""
    args = (2, 3, NPU)

    def time():
        ms = 1.0 / tiling.swiglu_block(*args).size
        return Summary(ms, ms, ms, ms, 1)

    try:
        with use_spec(NPU):
            kept, best, _ = _tune.tune_tiles(time(), time, CPU)
            assert kept == {("swiglu_block", args[:-1]): Variation(size=1)}
            assert _tune.tune_tiles(time(), time, CPU, kept) == ({}, best, [])
            assert time() == best
    finally:
        tiling.try_variation("swiglu_block", args, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tokens", "3"], "tokens must be at least 8; got 3"), (["--model", "nowhere.json"], "no file")],
)
def test_bad_arguments(model, capsys, options, message):
    assert main(["tune", "--model", model, *options]) == 2
    assert message in capsys.readouterr().err


def test_an_earlier_measurement_has_no_part_in_a_new_one(model, times, capsys, monkeypatch):
    earlier = tuned.Entry("torch", 9.0, 1.0, True, "float32", (("H", 64),), (8, 8))
    tuned.store("cpu", {"rms_norm": [earlier]})
    seen = []
    monkeypatch.setattr(_tune, "tune_op", lambda work, *args: seen.append(tuned.machines()) or _tune.Outcome(work))
    assert main(["tune", "--model", model]) == 0
    assert seen == [{}] * 2 * (len(descriptions.FORMS) - len(OF_STATES))
    assert "rms_norm" in tuned.machines()["cpu"].ops
