"""The file of measurements: what it decides, and what it may hold without being believed."""

import dataclasses
import functools
import json
import os
import pwd
import subprocess
import sys
import warnings

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels, backends, descriptions, tiling
from npu_trainer_kernels.device import ASCEND_CHIPS, DeviceSpec
from npu_trainer_kernels.evidence import tuned
from npu_trainer_kernels.evidence.tuned import Entry, Variation
from npu_trainer_kernels.ops import rms_norm
from npu_trainer_kernels.patching.modules import mlps
from npu_trainer_kernels.support import triton
from tests.models import assert_outcome_close, small_model

CPU = torch.device("cpu")


def result(backend="torch", ms=1.0, plain_ms=2.0, wins=False, tokens=(8, 64), dtype="float32", **sizes):
    return Entry(backend, ms, plain_ms, wins, dtype, tuple((sizes or {"H": 16}).items()), tokens)


FAST, SLOW = result(), result(ms=2.0, plain_ms=1.0, wins=True)
# Of `small_model`.
HIDDEN, VOCABULARY = 48, 331


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("NPU_KERNELS_TUNED")
    tuned.forget()
    yield tmp_path
    tuned.forget()


def measured():
    return {chip: dict(machine.ops) for chip, machine in tuned.machines().items()}


def test_stored_and_found_again_by_chip_and_op(folder):
    path = tuned.store("cpu", {"rms_norm": [FAST]})
    tuned.store("cpu", {"swiglu": [SLOW]})
    tuned.store("NVIDIA H200", {"rms_norm": [SLOW]})
    assert measured() == {"cpu": {"rms_norm": (FAST,), "swiglu": (SLOW,)}, "NVIDIA H200": {"rms_norm": (SLOW,)}}
    assert sorted(p.name for p in folder.iterdir()) == [".tuned.lock", path.name]


def test_results_of_other_ranges_stay_and_of_touching_ones_go():
    tuned.store("cpu", {"rms_norm": [FAST]})
    more, other, bf16 = result(tokens=(65, 512)), result(H=32), result(dtype="bfloat16")
    tuned.store("cpu", {"rms_norm": [more, other, bf16]})
    assert measured()["cpu"]["rms_norm"] == (FAST, more, other, bf16)
    tuned.store("cpu", {"rms_norm": [dataclasses.replace(SLOW, tokens=(64, 70))]})
    assert measured()["cpu"]["rms_norm"] == (other, bf16, dataclasses.replace(SLOW, tokens=(64, 70)))


# ---------------------------------------------------------------------------------------------------------- its range
def ids(tokens):
    return torch.arange(tokens).remainder(VOCABULARY).unsqueeze(0)


def own_code_runs(model, tokens):
    """Whether the first norm of a patched model runs its own forward for so many tokens. Nothing is put in its place,
    which would be code of its own."""
    norm, ran = model.model.layers[0].input_layernorm, []
    code = type(norm)._npu_kernels_original.forward.__code__

    def profile(frame, event, arg):
        ran.append(event == "call" and frame.f_code is code and frame.f_locals["self"] is norm)

    sys.setprofile(profile)
    try:
        model(input_ids=ids(tokens))
    finally:
        sys.setprofile(None)
    return any(ran)


@pytest.mark.parametrize(("tokens", "own"), [(7, False), (8, True), (64, True), (65, False)])
def test_a_model_runs_its_own_code_for_the_tokens_that_were_measured(tokens, own):
    tuned.store("cpu", {"rms_norm": [result(ms=2.0, plain_ms=1.0, wins=True, H=HIDDEN)]})
    model = small_model("llama").train()
    with apply_npu_kernels(model) as kernels:
        assert own_code_runs(model, tokens) is own
        assert "8 to 64 tokens: its own code (measured)" in kernels.report().text(full=True)
    with apply_npu_kernels(model, ops=["rms_norm"]):
        assert not own_code_runs(model, tokens)  # asked for by name
    with apply_npu_kernels(model, backend="rms_norm=torch"):
        assert not own_code_runs(model, tokens)


BY_KEYWORD = {
    "rms_norm": ({"H": HIDDEN}, lambda body, n: body.norm(hidden_states=torch.ones(1, n, HIDDEN))),
    "swiglu": ({"I": 80}, lambda body, n: body.layers[0].mlp(x=torch.ones(1, n, HIDDEN))),
    "embedding": ({"V": VOCABULARY, "H": HIDDEN}, lambda body, n: body.embed_tokens(input=ids(n))),
}


@pytest.mark.parametrize("op", BY_KEYWORD)
def test_a_call_by_keyword_has_as_many_tokens(op):
    """Where its own code is faster a module runs that without a word; elsewhere the op serves the call."""
    sizes, call = BY_KEYWORD[op]
    slow = result(ms=2.0, plain_ms=1.0, wins=True, **sizes)
    tuned.store("cpu", {op: [slow, result(tokens=(65, 99), **sizes)]})
    model = small_model("llama").train()
    with apply_npu_kernels(model) as kernels:
        call(model.model, 64)
        assert (kernels.report().ran[op], kernels.report().declined) == (0, [])
        call(model.model, 65)
        assert (kernels.report().ran[op], kernels.report().declined) == (1, [])


@pytest.mark.parametrize("change", [{"H": 2 * HIDDEN}, {"H": HIDDEN, "dtype": "bfloat16"}])
def test_what_was_measured_at_other_sizes_changes_nothing(change):
    tuned.store("cpu", {"rms_norm": [result(ms=2.0, plain_ms=1.0, wins=True, **change)]})
    model = small_model("llama").train()
    with apply_npu_kernels(model) as kernels:
        assert not own_code_runs(model, 16)
        assert "(measured)" not in kernels.report().text(full=True)


def test_the_head_is_never_left_out():
    """Whatever a file says: at the head plain PyTorch's logits cost memory that a time does not show."""
    everything = result(ms=2.0, plain_ms=1.0, wins=True, H=HIDDEN, V=VOCABULARY)
    tuned.store("cpu", {op: [everything] for op in ("linear_cross_entropy", "linear_logprob")})
    with apply_npu_kernels(small_model("llama")) as kernels:
        assert {"linear_cross_entropy", "linear_logprob"} <= {r.op for r in kernels.report().replaced}


@pytest.mark.parametrize(("tokens", "ours"), [(8, True), (64, True), (65, False)])
def test_what_the_table_leaves_out_is_put_in_where_it_was_measured_to_pay(monkeypatch, tokens, ours):
    model = small_model("llama").train()
    inner = model.config.intermediate_size
    tuned.store("cpu", {"swiglu": [result(I=inner)], "rope": [result(Q=99, K=2, D=16)]})
    ran = []
    original = mlps.swiglu_linear
    monkeypatch.setattr(mlps, "swiglu_linear", lambda *args, **kwargs: ran.append(1) or original(*args, **kwargs))
    with apply_npu_kernels(model) as kernels:
        replaced = {r.op for r in kernels.report().replaced}
        model(input_ids=ids(tokens))
    assert "swiglu" in replaced
    assert "rope" not in replaced
    assert bool(ran) is ours


def test_losses_and_gradients_are_the_same_on_both_sides_of_the_range():
    tuned.store("cpu", {
        op: [result(ms=2.0, plain_ms=1.0, wins=True, H=HIDDEN)] for op in ("rms_norm", "add_rms_norm")
    })  # fmt: skip
    for tokens in (16, 80):
        model, plain = small_model("llama"), small_model("llama")
        expected, truth = step(plain, tokens), step(small_model("llama").double(), tokens)
        with apply_npu_kernels(model):
            found = step(model, tokens)
        assert_outcome_close(model, found, expected, truth, functools.partial(step, plain, tokens))


def step(model, tokens):
    model.zero_grad()
    loss = model(input_ids=ids(tokens), labels=ids(tokens)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_the_fastest_backend_serves_calls_of_its_range_alone(monkeypatch):
    monkeypatch.setattr(triton, "INTERPRETED", True)
    tuned.store("cpu", {"rms_norm": [result("triton")]})

    def chosen(tokens, hidden=16, dtype=torch.float32, override=None):
        return backends.choose("rms_norm", CPU, override, at=lambda: (dtype, tokens, (hidden,)))

    assert chosen(8) == chosen(64) == "triton"
    assert [chosen(7), chosen(65), chosen(8, 32), chosen(8, 16, torch.bfloat16)] == ["torch"] * 4
    assert chosen(8, override="torch") == "torch"
    assert backends.choose("rms_norm", CPU) == "torch"
    (entry,) = backends.measurements("rms_norm", CPU, None, torch.float32, (16,))
    assert str(entry) == (
        "measured here: triton 1 ms, plain PyTorch 2 ms, 8 to 64 tokens, H=16 float32 (npu-kernels tune)"
    )


def test_every_op_says_its_shape(monkeypatch):
    """What ops tell the choice is what `npu-kernels tune` stores of them."""
    told = {}
    choose = backends.choose

    def spied(op, *args, at=None, **kwargs):
        told.setdefault(op, at or (args[4] if len(args) > 4 else None))
        return choose(op, *args, at=at, **kwargs)

    monkeypatch.setattr(backends, "choose", spied)
    shapes = descriptions.ModelShapes(
        hidden=24,
        intermediate=40,
        vocabulary=57,
        heads=6,
        kv_heads=2,
        head_dim=4,
        experts=4,
        slots=2,
        channels=20,
        taps=3,
        state_keys=1,
        state_values=2,
        key_size=6,
        value_size=4,
    )
    for work in descriptions.of_model(shapes, 16, "float32"):
        told.clear()
        inputs = work.inputs(CPU)
        work.ours(None)(inputs.tensors)
        if work.op in ("linear_rms_norm", "swiglu_linear"):
            continue  # the op alone decides for these
        dtype, tokens, sizes = told[work.backend_op]()
        assert (dtype, tokens, tuple(sizes)) == (
            torch.float32,
            work.tokens,
            tuple(size for _, size in work.model_sizes),
        )
        assert tokens == 16 or work.op == "varlen_attention"  # of which 9 are no padding


def test_layers_that_differ_are_each_looked_up(monkeypatch):
    """Gemma 4's larger models have other numbers of heads in some layers: transformers answers for a layer alone."""
    from transformers import AriaTextConfig, Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=99, vocab_size_per_layer_input=99, hidden_size=32, hidden_size_per_layer_input=0,
        intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_global_key_value_heads=1, global_head_dim=16, attention_k_eq_v=True, num_kv_shared_layers=0,
        enable_moe_block=True, num_experts=4, top_k_experts=3, moe_intermediate_size=16,
    )  # fmt: skip
    shapes = descriptions.ModelShapes.of_config(config)
    assert (shapes.kv_heads, shapes.head_dim, shapes.experts, shapes.slots) == (2, 8, 4, 3)
    assert descriptions.ModelShapes.of_config(AriaTextConfig()).slots == 2
    asked = set()
    monkeypatch.setattr(backends, "keeps_plain", lambda *args: None)  # as on an accelerator
    monkeypatch.setattr(backends, "measurements", lambda op, *args: asked.add((op, args[-1])) or ())
    with apply_npu_kernels(Gemma4ForCausalLM(config)):
        assert asked >= {("rope", (4, 2, 8)), ("rope", (4, 1, 16)), ("moe_experts", (32, 16, 4, 3))}


def test_nothing_is_asked_for_where_nothing_was_measured():
    assert backends.choose("rms_norm", CPU, at=lambda: pytest.fail("asked")) == "torch"
    tuned.store("cpu", {"swiglu": [FAST]})
    assert backends.choose("rms_norm", CPU, at=lambda: pytest.fail("asked")) == "torch"


def test_a_backend_that_cannot_run_here_is_not_chosen():
    tuned.store("cpu", {"rms_norm": [result("vendor")]})
    assert backends.choose("rms_norm", CPU, at=lambda: (torch.float32, 8, (16,))) == "torch"


# --------------------------------------------------------------------------------------------------------- the file
def test_another_version_made_it_and_a_warning_says_so_once(monkeypatch):
    tuned.store("cpu", {"rms_norm": [SLOW]})
    monkeypatch.setattr(tuned, "_versions", lambda: {"torch": "99.0"})
    tuned.forget()
    with pytest.warns(
        UserWarning, match=r"measured on cpu is ignored, since versions have changed \(torch .* -> 99\.0"
    ):
        assert tuned.machine("cpu") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.measurements("rms_norm", CPU, None, torch.float32, (16,)) == ()
        assert tuned.machine("NVIDIA H200") is None
    tuned.store("cpu", {"swiglu": [FAST]})
    assert measured() == {"cpu": {"swiglu": (FAST,)}}


_STORES = """
import sys
from npu_trainer_kernels.evidence import tuned
for i in range(20):
    entry = tuned.Entry("torch", 1.0, 2.0, False, "float32", (("H", int(sys.argv[1]) + i),), (8, 64))
    tuned.store("cpu", {"rms_norm": [entry]})
"""


def test_two_that_store_at_once_lose_nothing():
    both = [subprocess.Popen([sys.executable, "-c", _STORES, str(first)]) for first in (100, 200)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    tuned.forget()
    found = {entry.sizes[0][1] for entry in measured()["cpu"]["rms_norm"]}
    assert found == {*range(100, 120), *range(200, 220)}


def test_a_file_that_would_grow_too_large_is_not_written(monkeypatch):
    tuned.store("cpu", {"rms_norm": [FAST]})
    monkeypatch.setattr(tuned, "MAX_BYTES", 600)
    with pytest.raises(OSError, match="would be larger than 600 bytes; remove it"):
        tuned.store("cpu", {"swiglu": [SLOW]})
    tuned.forget()
    assert measured() == {"cpu": {"rms_norm": (FAST,)}}


def test_it_can_be_ignored(monkeypatch):
    tuned.store("cpu", {"rms_norm": [SLOW]})
    monkeypatch.setenv("NPU_KERNELS_TUNED", "0")
    tuned.forget()
    assert tuned.machines() == {}


def entry(**changes):
    fields = {"backend": "torch", "ms": 1.0, "plain_ms": 2.0, "plain_wins": False, "dtype": "float32"}
    fields |= {"sizes": {"H": 16}, "tokens": [8, 64], **changes}
    machine = {"versions": {}, "ops": {"rms_norm": [fields]}, "tiles": []}
    return json.dumps({"format": 2, "machines": {"cpu": machine}})


def tile(**changes):
    fields = {"function": "swiglu_block", "args": [2, 5], "size": 1, "warps": 0}
    machine = {"versions": {}, "ops": {}, "tiles": [{**fields, **changes}]}
    return json.dumps({"format": 2, "machines": {"cpu": machine}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        '{"format": 1, "machines": {}}',
        '{"format": 2, "machines": []}',
        '{"format": 2, "machines": {"cpu": null}}',
        '{"format": 2, "machines": {"cpu": {"versions": [], "ops": {}}}}',
        '{"format": 2, "machines": {"cpu": {"versions": {"torch": 2}, "ops": {}}}}',
        '{"format": 2, "machines": {"cpu": {"versions": {}, "ops": {"rms_norm": []}}}}',
        entry(backend="os.system"),
        entry(backend=["torch"]),
        entry(ms=-1),
        entry(ms="1"),
        entry(ms=float("nan")),
        entry(ms=True),
        entry(plain_ms=0),
        entry(plain_wins=1),
        entry(plain_wins=True, plain_ms=None),
        entry(sizes={"a\nb": 1}),
        entry(sizes={}),
        entry(sizes=[16]),
        entry(sizes={"H": 0}),
        entry(sizes={"H": True}),
        entry(sizes={"H": "16"}),
        entry(tokens=[8]),
        entry(tokens=[64, 8]),
        entry(tokens=[0, 8]),
        entry(tokens="88"),
        entry(tokens={"8": 1, "64": 1}),
        entry(dtype="x" * 999),
        entry(more=1),
        tile(function=["swiglu_block"]),
        tile(args=["2"]),
        tile(args=5),
        tile(size=4),
        tile(size=True),
        tile(warps=1.0),
        "[" * 100_000,
        entry() + " " * (1 << 19),
        '{"format": 2, "machines": {"\ud800": {}}}',
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_a_warning(folder, text):
    (folder / "tuned.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.warns(UserWarning, match=r"tuned\.json is ignored"):
        assert tuned.machines() == {}
    # It is read once, and can be written anew.
    assert backends.choose("rms_norm", CPU) == "torch"
    with pytest.warns(UserWarning, match="is ignored"):
        tuned.store("cpu", {"rms_norm": [FAST]})
    assert measured() == {"cpu": {"rms_norm": (FAST,)}}


def test_a_folder_in_its_place_and_one_that_may_not_be_read(folder):
    (folder / "tuned.json").mkdir()
    with pytest.warns(UserWarning, match=r"tuned\.json is ignored"):
        assert tuned.machines() == {}
    with pytest.raises(OSError, match="not a regular file"):
        tuned.check_writable()


def test_a_pipe_in_its_place_is_not_waited_for(folder):
    os.mkfifo(folder / "tuned.json")
    with pytest.warns(UserWarning, match="ignored: .*tuned.json is not a regular file"):
        assert backends.measurements("rms_norm", CPU, None, torch.float32, (16,)) == ()


def test_no_home_is_a_warning_in_ops_and_an_error_to_who_stores(monkeypatch):
    for name in ("NPU_KERNELS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.warns(UserWarning, match="cannot be looked up: there is no home folder .*set NPU_KERNELS_CACHE"):
        out = rms_norm(torch.ones(2, 16), torch.ones(16))
    assert out.shape == (2, 16)
    with pytest.raises(OSError, match="there is no home folder"):
        tuned.check_writable()


def test_whether_it_can_be_written_is_known_before(folder, monkeypatch):
    tuned.check_writable()
    tuned.check_writable()
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(folder / "a file" / "below"))
    (folder / "a file").write_text("")
    with pytest.raises(NotADirectoryError):
        tuned.check_writable()


def test_no_file_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.machines() == {}


# ---------------------------------------------------------------------------------------------------------------- tiles
H200 = DeviceSpec("cuda", "NVIDIA H200", 132, 256 << 10, 141 << 30)
NPU = ASCEND_CHIPS["Ascend910B4"]


@pytest.fixture
def fresh_tiles():
    tiling.forget_tiles()
    yield
    tiling.forget_tiles()


def test_a_measured_tile_goes_before_the_formula_on_its_chip_alone(fresh_tiles):
    formula = tiling.swiglu_block(2, 5, H200)
    tuned.store("NVIDIA H200", {}, {("swiglu_block", (2, 5)): Variation(size=1, warps=-1)})
    tiling.forget_tiles()
    changed = tiling.swiglu_block(2, 5, H200)
    assert changed.size == 2 * formula.size
    assert changed.options == {"num_warps": formula.options["num_warps"] // 2}
    assert tiling.swiglu_block(2, 3, H200) == tiling.swiglu_block(2, 3, dataclasses.replace(H200, name="NVIDIA H100"))
    assert tiling.swiglu_block(2, 5, dataclasses.replace(H200, name="NVIDIA H100")) == formula


def test_a_variation_covers_the_same_row():
    formula = tiling.norm_forward_tile(4096, 2, True, False, False, H200)
    for by in (Variation(s, w) for s in (-1, 0, 1) for w in (-1, 0, 1)):
        tile = tiling.varied(formula, by)
        assert (tile.cols, tile.blocks) == (formula.cols, formula.blocks)
        assert tile.rows >= 1
        assert 1 <= tile.options["num_warps"] <= 32
    # On an NPU the formula's is chosen by overlap, not the largest that fits: a larger one may be better.
    npu = tiling.swiglu_block(2, 5, NPU)
    for by in (-1, 0, 1):
        assert tiling.varied(npu, Variation(size=by)).size == npu.size * 2**by
    assert tiling.varied(None, Variation(size=1)) is None


def test_a_variation_of_one_row_in_pieces():
    """Two rows are not in pieces, one of two is; a row in halves stays alone."""
    one = tiling.norm_forward_tile(8192, 2, True, False, False, NPU)
    assert (one.rows, one.pieces) == (1, 8)
    assert tiling.varied(one, Variation(size=-1)).pieces == 8
    assert (tiling.varied(one, Variation(size=1)).rows, tiling.varied(one, Variation(size=1)).pieces) == (2, 1)
    two = tiling.norm_forward_tile(4096, 2, True, False, False, NPU)
    assert (two.rows, two.pieces, tiling.varied(two, Variation(size=-1)).pieces) == (2, 1, 8)
    halves = tiling.norm_backward_tile(7168, 2, False, False, NPU)
    assert halves.halves
    assert tiling.varied(halves, Variation(size=1)) == halves


def test_a_variation_of_rows_one_by_one_has_no_block_beyond_the_row():
    """A kernel without a tail has no mask: what it wrote there would be another row's."""
    for width in (16, 328, 7168, 12288):
        formula = tiling.expert_rows_tile(width, 2, NPU)
        for by in (-1, 0, 1):
            tile = tiling.varied(formula, Variation(size=by))
            assert (tile.blocks - 1) * tile.cols < width <= tile.blocks * tile.cols
            assert tile.cols <= width
    assert tiling.varied(tiling.expert_rows_tile(7168, 2, NPU), Variation(size=-1)).blocks == 2


def test_a_tile_is_computed_once(fresh_tiles):
    """The file and the formula are asked on a miss alone: a launch pays for a look-up."""
    first = tiling.swiglu_block(2, 5, H200)
    tuned.store("NVIDIA H200", {}, {("swiglu_block", (2, 5)): Variation(size=1)})
    assert tiling.swiglu_block(2, 5, H200) is first


def test_half_a_file_is_never_seen(folder, monkeypatch):
    tuned.store("cpu", {"rms_norm": [FAST]})

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned.store("cpu", {"rms_norm": [SLOW]})
    tuned.forget()
    assert measured() == {"cpu": {"rms_norm": (FAST,)}}
