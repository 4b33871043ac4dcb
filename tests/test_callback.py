"""NpuKernelsCallback in a real Trainer: when it patches, when it restores, what it logs."""

import inspect
import time
from unittest import mock

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from npu_trainer_kernels import NpuKernelsArguments, NpuKernelsCallback, apply_npu_kernels, device
from npu_trainer_kernels.patching.classes import original_class
from npu_trainer_kernels.patching.head import head_call
from npu_trainer_kernels.patching.modules.norms import RmsNormPatch
from npu_trainer_kernels.run import RunCallback
from npu_trainer_kernels.verify import on_one_device
from tests.models import batch, small_model


class Rows(torch.utils.data.Dataset):
    """Eight rows of random tokens."""

    def __init__(self, rows=8):
        self.data = batch(rows=rows)

    def __len__(self):
        return len(self.data["input_ids"])

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.data.items()}


def patched(model) -> bool:
    return original_class(model.model.norm) is not type(model.model.norm)


def make_trainer(tmp_path, model=None, callbacks=(), **arguments):
    defaults = {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
    }
    model = small_model("llama") if model is None else model
    arguments = on_one_device(TrainingArguments(**{**defaults, **arguments}))
    return Trainer(model, arguments, train_dataset=Rows(), callbacks=list(callbacks))


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_patched_from_construction_to_the_end_of_training(tmp_path, capsys):
    callback = NpuKernelsCallback()
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(patched(model))

    trainer = make_trainer(tmp_path, callbacks=[callback, Look()])
    assert patched(trainer.model)
    trainer.train()
    assert seen == [True] * 3
    assert not patched(trainer.model)
    assert capsys.readouterr().out.count("NPU kernels on") == 1
    assert {r.op for r in callback.report().replaced} >= {"rms_norm", "linear_cross_entropy"}


WAYS_IN = {
    "callback": (NpuKernelsCallback, 'NpuKernelsCallback(report="full")'),
    "arguments": (lambda: NpuKernelsArguments(use_npu_kernels=True).callbacks()[0], "--npu_kernels_report full"),
    "run": (RunCallback, "npu-kernels run --report full, or NPU_KERNELS_REPORT=full"),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_the_short_report_names_the_option_of_its_way_in(tmp_path, capsys, monkeypatch, way):
    monkeypatch.delenv("NPU_KERNELS_REPORT", raising=False)
    make, option = WAYS_IN[way]
    callback = make()
    make_trainer(tmp_path, callbacks=[callback], max_steps=1).train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("(in full: ")]
    assert printed == [f"(in full: {option})"]
    # Who holds the report needs no option.
    assert "\n(in full: report().text(full=True))" in str(callback.report())


def test_same_losses_as_without(tmp_path):
    plain, fused = make_trainer(tmp_path), make_trainer(tmp_path, callbacks=[NpuKernelsCallback()])
    plain.train()
    fused.train()
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-5)


def test_uneven_gradient_accumulation_divides_by_the_tokens_of_the_window(tmp_path):
    """The normaliser spans the accumulation window; rows with different numbers of labels show a wrong one."""
    runs = []
    for callbacks in ([], [NpuKernelsCallback()]):
        trainer = make_trainer(tmp_path, callbacks=callbacks, gradient_accumulation_steps=3)
        for i, row in enumerate(trainer.train_dataset.data["labels"]):
            row[: 2 * i] = -100
        trainer.train()
        runs.append(losses(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_logs_tokens_per_second_and_peak_memory_everywhere(tmp_path, monkeypatch, accelerator):
    """Also on the CPU of a machine that has an accelerator."""
    monkeypatch.setattr(device, "accelerator", lambda: accelerator)
    trainer = make_trainer(tmp_path, callbacks=[NpuKernelsCallback()])
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    assert entry["tokens_per_second"] > 0
    assert entry["peak_memory_gib"] > 0
    assert "log" not in vars(trainer)


def test_logs_what_was_left_out_since_the_last_entry(tmp_path):
    """Two rows of 20 positions a step: with 20 and 12 tokens that begin alike, then with 15 each that do not."""
    ids = torch.arange(3, 50)
    rows = [(ids[:20], 20), (ids[:20], 12), (ids[10:30], 15), (ids[20:40], 15)]
    data = [
        {"input_ids": row, "attention_mask": live.long(), "labels": row.masked_fill(~live, -100)}
        for row, live in ((row, torch.arange(20) < n) for row, n in rows)
    ]
    trainer = make_trainer(tmp_path, callbacks=[NpuKernelsCallback()], max_steps=2)
    trainer.train_dataset, trainer._get_train_sampler = data, lambda *_: SequentialSampler(data)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(e["padding_left_out"], e["beginnings_left_out"]) for e in entries] == [(0.2, 12 / 32), (0.25, 0.0)]


def test_logs_nothing_of_padding_where_none_is_left_out(tmp_path):
    for callback in (NpuKernelsCallback(), NpuKernelsCallback(ops=["rms_norm"])):
        trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=1)
        trainer.train()
        entry = next(e for e in trainer.state.log_history if "loss" in e)
        assert "tokens_per_second" in entry
        assert not {"padding_left_out", "beginnings_left_out"} & entry.keys()


class Clock(TrainerCallback):
    """A clock that stands still, but for what some events and each row of data take."""

    def __init__(self, monkeypatch, row=0.0):
        self.now, self.row = 1000.0, row
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def on_epoch_begin(self, *args, **kwargs):
        self.now += 5.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.now += state.global_step + 1

    def on_substep_end(self, *args, **kwargs):
        self.now += 0.5

    def on_step_end(self, args, state, control, **kwargs):
        self.now += 10.0 * state.global_step


class SlowRows(Rows):
    """Two rows, so that each step is an epoch of its own, and nothing is loaded ahead of the step before."""

    def __init__(self, clock):
        super().__init__(rows=2)
        self.clock = clock

    def __getitem__(self, i):
        self.clock.now += self.clock.row
        return super().__getitem__(i)


def step_times(trainer):
    found = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["update_seconds"], entry["waiting_seconds"]) for entry in found]


def test_logs_the_time_of_updates_and_between_them(tmp_path, monkeypatch):
    """The averages of two steps each: of the first, and of those since the last entry. Events after this callback's own
    spend the time, so what `on_step_begin` takes is a step's, and what `on_step_end` takes is the wait for the next."""
    clock = Clock(monkeypatch)
    callbacks = [NpuKernelsCallback(), clock]
    trainer = make_trainer(tmp_path, None, callbacks, max_steps=4, logging_steps=2, gradient_accumulation_steps=2)
    trainer.train_dataset = Rows(rows=16)
    trainer.train()
    between = ((0 + 5) + 10) / 2, (20 + 30) / 2
    assert step_times(trainer) == [((1 + 2) / 2 + 0.5, between[0]), ((3 + 4) / 2 + 0.5, between[1])]
    # A second training begins anew: what has passed since the first is no wait.
    clock.now += 1e6
    trainer.train()
    assert step_times(trainer)[0] == (2.0, between[0])


def test_data_is_waited_for(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, row=0.25)
    trainer = make_trainer(tmp_path, callbacks=[NpuKernelsCallback(), clock])
    trainer.train_dataset = SlowRows(clock)
    trainer.train()
    assert step_times(trainer) == [(1 + i, 2 * 0.25 + 5 + 10 * i) for i in range(3)]


def test_tokens_are_counted_once_also_under_a_peft_wrapper(tmp_path):
    from peft import LoraConfig, get_peft_model

    callback = NpuKernelsCallback()
    model = get_peft_model(small_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    make_trainer(tmp_path, model, [callback], max_steps=1).train()
    assert callback.handle.tokens == 2 * 17


@pytest.mark.parametrize("where", ["step", "data", "callback"])
def test_restored_when_training_raises(tmp_path, where):
    class Broken(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            if where == "callback":
                raise RuntimeError("planted")

    trainer = make_trainer(tmp_path, callbacks=[NpuKernelsCallback(), Broken()])
    if where == "step":
        trainer.train_dataset.data["labels"] += 10_000
    elif where == "data":
        trainer.train_dataset.data["labels"] = None
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        trainer.train()
    assert not patched(trainer.model)
    assert "log" not in vars(trainer)


def test_trains_again_after_restoring(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[NpuKernelsCallback()])
    trainer.train()
    trainer.train()
    assert not patched(trainer.model)


def test_attach_to_an_existing_trainer(tmp_path):
    trainer, callback = make_trainer(tmp_path), NpuKernelsCallback()
    trainer.add_callback(callback)
    callback.attach(trainer)
    assert patched(trainer.model)
    trainer.train()
    assert not patched(trainer.model)


def test_added_later_without_attach_restores_after_a_failing_step(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(NpuKernelsCallback())
    trainer.train_dataset.data["labels"] += 10_000
    with pytest.raises(ValueError, match="target must lie in"):
        trainer.train()
    assert not patched(trainer.model)


def test_model_init_rebuilds_the_model(tmp_path):
    callback = NpuKernelsCallback()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(
        model_init=lambda: small_model("llama"), args=arguments, train_dataset=Rows(), callbacks=[callback]
    )
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert not patched(first)
    assert not patched(trainer.model)
    assert callback.report().replaced


@pytest.mark.parametrize("form", ["short", "full"])
def test_the_report_is_short_unless_asked_for_in_full(tmp_path, capsys, form):
    make_trainer(tmp_path, callbacks=[NpuKernelsCallback(report=form)], max_steps=1).train()
    out = capsys.readouterr().out
    assert ("model.layers.0" in out) is ("why these backends" in out) is (form == "full")
    assert "  linear_cross_entropy  torch: Linear\n" in out or form == "full"
    # Its model has no head of TRL's.
    assert ("linear_logprob" in out) is (form == "full")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"report": "long"}, "report must be one of short, full; got 'long'"),
        ({"ops": ["foo"]}, r"ops must be a sequence of rms_norm, .*; got \['foo'\]"),
        ({"ops": "rms_norm"}, "ops must be a sequence of"),
        ({"ops": 3}, "ops must be a sequence of rms_norm, .*; got 3"),
        ({"ops": []}, r"ops must be a sequence of rms_norm, .*, one at least; got \[\]"),
        ({"backend": "cudnn"}, "backend must be one of"),
        ({"backend": ["torch"]}, r"backend must be 'torch' or 'op=backend,...'; got \['torch'\]"),
        ({"strict": "no"}, "strict must be true or false; got 'no'"),
        ({"warm_up": "no"}, "warm_up must be true or false; got 'no'"),
        ({"balance": None}, "balance must be true or false; got None"),
    ],
)
def test_wrong_options_raise_before_there_is_a_trainer(options, message):
    with pytest.raises(ValueError, match=message):
        NpuKernelsCallback(**options)


@mock.patch.dict("os.environ")  # transformers leaves accelerate's words for later trainers there
def test_a_compiled_run_is_the_same_and_says_what_runs(tmp_path):
    callback = NpuKernelsCallback()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    plain, fused = make_trainer(tmp_path), make_trainer(tmp_path, callbacks=[callback], **options)
    plain.train()
    fused.train()
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-5)
    assert "torch_compile: what it traces runs in plain PyTorch" in str(callback.report())
    assert callback.report().ran["linear_cross_entropy"] == len(losses(fused))
    assert not patched(fused.model)


def test_label_smoothing_forms_logits_and_that_is_reported(tmp_path):
    """The Trainer's label smoother takes a log-softmax of them."""
    callback = NpuKernelsCallback()
    trainer = make_trainer(tmp_path / "patched", callbacks=[callback], label_smoothing_factor=0.1)
    trainer.train()
    plain = make_trainer(tmp_path / "plain", label_smoothing_factor=0.1)
    plain.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    (declined,) = callback.report().declined
    assert declined.op == "linear_cross_entropy"
    assert declined.reason == "logits that were given to torch.nn.functional.log_softmax"


class LeftPadded(Rows):
    """Two rows in three begin with padding, and a label is predicted there."""

    def __init__(self):
        super().__init__()
        begins = torch.arange(len(self)).unsqueeze(1) % 3
        mask = torch.arange(self.data["input_ids"].shape[1]) >= begins
        self.data |= {"attention_mask": mask.long(), "labels": self.data["input_ids"].masked_fill(~mask, -100)}


def own_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_that_the_model_is_not_given_are_looked_at(tmp_path, smoothing):
    """The Trainer keeps them for its label smoothing and for a loss function of the user's, also in evaluation."""
    runs, report = [], None
    for callbacks in ([], [NpuKernelsCallback(ops=["varlen_attention"], warm_up=False)]):
        model = small_model("llama", pad_token_id=None)
        trainer = make_trainer(tmp_path, model, callbacks, label_smoothing_factor=smoothing)
        trainer.train_dataset = LeftPadded()
        trainer.compute_loss_func = None if smoothing else own_loss
        before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        trainer.train()
        runs.append([before, *losses(trainer)])
        assert "compute_loss" not in vars(trainer)
        report = callbacks[0].report() if callbacks else None
    assert runs[1] == runs[0]
    assert {each.reason for each in report.declined} == {"labels are predicted at positions of padding"}


def test_methods_of_a_trainer_are_wrapped_once_and_keep_their_signatures(tmp_path):
    """Also where the user has replaced one by then, whose own is there again when training is over."""
    callback = NpuKernelsCallback(warm_up=False)
    trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=1)
    callback.attach(trainer)
    own = trainer.compute_loss.__wrapped__
    assert own == Trainer.compute_loss.__get__(trainer)
    assert inspect.signature(trainer.compute_loss) == inspect.signature(own)
    assert inspect.signature(trainer.train) == inspect.signature(Trainer.train.__get__(trainer))
    wrapped = []

    def compute_loss(*args, **kwargs):
        wrapped.append(trainer.compute_loss.__wrapped__)
        return own(*args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert wrapped == [compute_loss]
    assert trainer.compute_loss is compute_loss
    assert not {"train", "training_step", "log"} & vars(trainer).keys()


def test_a_loss_of_the_users_own_is_fused_where_it_is_a_cross_entropy(tmp_path, monkeypatch):
    fused = []
    original = head_call.fused_linear_cross_entropy
    monkeypatch.setattr(
        head_call,
        "fused_linear_cross_entropy",
        lambda *args, **kwargs: (fused.append(1), original(*args, **kwargs))[1],
    )

    def compute_loss(outputs, labels, num_items_in_batch=None):
        assert outputs.logits.shape[-1] == 331
        logits = outputs.logits[:, :-1].float().flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    callback = NpuKernelsCallback()
    found = []
    for name, callbacks in (("plain", []), ("patched", [callback])):
        trainer = make_trainer(tmp_path / name, callbacks=callbacks)
        trainer.compute_loss_func = compute_loss
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len(fused) == 3 + len(callback.report().audits)  # which compares some rows
    assert not callback.report().declined


def test_the_first_batch_is_compared(tmp_path):
    plain, callback, off = make_trainer(tmp_path), NpuKernelsCallback(), NpuKernelsCallback(audit="off")
    with_audit, without = make_trainer(tmp_path, callbacks=[callback]), make_trainer(tmp_path, callbacks=[off])
    for trainer in (plain, with_audit, without):
        trainer.train()
    assert losses(with_audit) == losses(without) == pytest.approx(losses(plain), rel=1e-5)
    (seen,) = callback.report().audits
    assert not seen.differing
    assert seen.rows == 2
    assert "compared with the model's own code:\n  2 rows of 17 places" in str(callback.report())
    assert not off.report().audits


@pytest.mark.parametrize(("steps", "times"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_it_is_compared_again_after_so_many_steps(tmp_path, steps, times):
    callback = NpuKernelsCallback(audit=steps)
    make_trainer(tmp_path, callbacks=[callback], max_steps=4).train()
    assert len(callback.report().audits) == times


def test_what_differs_on_the_first_batch_is_taken_out_before_the_first_step(tmp_path, monkeypatch):
    plain = make_trainer(tmp_path)
    plain.train()
    run = RmsNormPatch.run
    monkeypatch.setattr(RmsNormPatch, "run", lambda *args, **kwargs: run(*args, **kwargs) * 1.01)
    callback = NpuKernelsCallback(ops=["rms_norm"])
    patched = make_trainer(tmp_path, callbacks=[callback])
    with pytest.warns(UserWarning, match="rms_norm in LlamaRMSNorm differs from the model's own code on this batch"):
        patched.train()
    assert losses(patched) == losses(plain)
    assert callback.report().audits[0].differing


@pytest.mark.parametrize("audit", ["never", 0, -1, 1.5, True, None, "1.5"])
def test_an_audit_that_is_none_is_refused(audit):
    with pytest.raises(ValueError, match="audit must be 'first', 'off' or a positive number of steps; got"):
        NpuKernelsCallback(audit=audit)


def test_a_compiled_run_is_not_compared(tmp_path):
    callback, model = NpuKernelsCallback(ops=["rms_norm"]), small_model("llama")
    callback._handle = apply_npu_kernels(model, ops=["rms_norm"])
    callback._compare(mock.Mock(torch_compile=True))
    assert "torch_compile: what is served is not compared" in str(callback.report())
    assert not callback.report().audits


def test_arguments_give_the_callback_only_with_the_flag():
    assert NpuKernelsArguments().callbacks() == []
    (callback,) = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_ops=["rms_norm"]).callbacks()
    assert isinstance(callback, NpuKernelsCallback)
    with pytest.raises(ValueError, match="without --use_npu_kernels"):
        NpuKernelsArguments(npu_kernels_ops=["rms_norm"])
    with pytest.raises(ValueError, match="npu_kernels_report does nothing without"):
        NpuKernelsArguments(npu_kernels_report="full")
    (callback,) = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_report="full").callbacks()
    assert callback._full
    with pytest.raises(ValueError, match="npu_kernels_audit does nothing without"):
        NpuKernelsArguments(npu_kernels_audit="off")
    with pytest.raises(ValueError, match="npu_kernels_balance does nothing without"):
        NpuKernelsArguments(npu_kernels_balance=False)
    with pytest.raises(ValueError, match="npu_kernels_balance must be true or false; got 'no'"):
        NpuKernelsArguments(use_npu_kernels=True, npu_kernels_balance="no")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--npu_kernels_ops", "foo"], r"npu_kernels_ops must be a list of rms_norm, .*; got \['foo'\]"),
        (["--npu_kernels_report", "long"], "npu_kernels_report must be one of short, full; got 'long'"),
        (["--npu_kernels_backend", "cudnn"], "npu_kernels_backend must be one of"),
    ],
)
def test_the_parser_refuses_unknown_names(line, message):
    from transformers import HfArgumentParser

    with pytest.raises(ValueError, match=message):
        HfArgumentParser(NpuKernelsArguments).parse_args_into_dataclasses(["--use_npu_kernels", *line])
    with pytest.raises(ValueError, match="backend must be one of"):
        NpuKernelsArguments(use_npu_kernels=True, npu_kernels_backend="fast")


@pytest.mark.parametrize("source", ["command line", "commas", pytest.param("yaml", marks=pytest.mark.trl_head)])
def test_arguments_parse(tmp_path, source):
    from transformers import HfArgumentParser

    if source == "yaml":
        from trl import TrlParser

        config = tmp_path / "run.yaml"
        config.write_text("use_npu_kernels: true\nnpu_kernels_ops: [rms_norm, linear_logprob]\n")
        (parsed,) = TrlParser((NpuKernelsArguments,)).parse_args_and_config(["--config", str(config)])
    else:
        names = ["rms_norm,linear_logprob"] if source == "commas" else ["rms_norm", "linear_logprob"]
        line = ["--use_npu_kernels", "--npu_kernels_ops", *names]
        (parsed,) = HfArgumentParser((NpuKernelsArguments,)).parse_args_into_dataclasses(line)
    assert parsed.use_npu_kernels
    assert parsed.npu_kernels_ops == ["rms_norm", "linear_logprob"]
