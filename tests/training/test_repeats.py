"""The Trainer's walks over the model are short, and set, count and zero what they set, count and zero without us."""

import copy
import itertools
import sys
import types
from collections import Counter

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import GRPOTrainer, SFTConfig, SFTTrainer

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.training import repeats
from npu_trainer_kernels.verify import on_one_device
from tests.models import batch, small_model
from tests.training.test_grpo import tokenizer, train
from tests.training.test_trl_trainers import COMMON, SUMS

LENT = ("train", "num_parameters", "zero_grad")
METHODS = ("training_step", "floating_point_ops", "_get_learning_rate")
WALKS = [getattr(nn.Module, name).__code__ for name in ("train", "named_modules", "_named_members")]


class Frozen(nn.Sequential):
    """Keeps its normalization in evaluation, as timm's models do, and tells what it was asked for."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(3))))
        self.asked = []

    def train(self, mode=True):
        self.asked.append(mode)
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class Backwards(nn.Sequential):
    """Goes its own way with its children."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Dropout(), nn.Dropout()), nn.Sequential(nn.Dropout()))

    def train(self, mode=True):
        self.training = mode
        self[0].train(not mode)
        return self


class Stays(nn.Dropout):
    def train(self, mode=True):
        return self


def with_lora(model):
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear", use_dora=True))


def layer(model, index=0):
    return next(module for name, module in model.named_modules() if name.endswith(f"layers.{index}"))


class Watched(Trainer):
    """Has in `seen` what each micro-batch finds: the flag of every module, and the operations counted so far."""

    def compute_loss(self, *args, **kwargs):
        if self.model.training:
            flags = {name: module.training for name, module in self.model.named_modules(remove_duplicate=False)}
            self.seen.append((flags, self.current_flos + self.state.total_flos))
        return super().compute_loss(*args, **kwargs)


class Changes(TrainerCallback):
    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1 and self.change is not None:
            self.change(model)


def trainer_of(tmp_path, *callbacks, prepare=with_lora, **arguments):
    defaults = {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1,
        "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    data = batch(rows=8)
    rows = [{name: t[i] for name, t in data.items()} for i in range(8)]
    arguments = on_one_device(TrainingArguments(**{**defaults, **arguments}))
    model = prepare(small_model("qwen3"))
    trainer = Watched(model, arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=list(callbacks))
    trainer.seen = []
    return trainer


def kernels():
    return NpuKernelsCallback(warm_up=False, audit="off")


def eval_of_a_part(model):
    layer(model).self_attn.eval()


def eval_of_all(model):
    model.eval()


def added(model):
    layer(model, 1).mlp.late = nn.Sequential(nn.Dropout(), nn.Embedding(3, 2), nn.Linear(2, 2)).eval()


def added_below_the_modules_of_torch(model):
    layer(model)._modules["late"] = nn.Linear(3, 3).eval()


def replaced(model):
    layer(model).late = nn.Sequential(nn.Linear(5, 5)).eval()


def removed(model):
    del layer(model).late


def frozen_later(model):
    layer(model).late = Frozen()


def a_method_of_an_instance(model):
    layer(model).late.train = types.MethodType(lambda self, mode=True: self, layer(model).late)
    layer(model).late.training = False


def another_class(model):
    layer(model).late[0].__class__ = Stays
    layer(model).late[0].training = False


def a_train_of_a_class(model):
    part = layer(model).late[0]
    type(part).train = Stays.train
    part.training = False


def a_parameter_is_added(model):
    layer(model).self_attn.late = nn.Parameter(torch.zeros(7))


def a_parameter_is_shared(model):
    layer(model).late[1].weight = layer(model).late[2].weight


def a_parameter_is_resized(model):
    layer(model).late[1].weight.data = torch.zeros(6, 6)


def an_embedding_becomes_a_layer(model):
    layer(model).late.embedding.__class__ = nn.Linear


def with_a_part(part):
    """The model, whose first layer has one more part."""

    def prepare(model):
        layer(model).late = part()
        return model

    return prepare


def dropouts():
    of_this_model = type("Dropout", (nn.Dropout,), {})
    made = nn.Sequential(of_this_model(), nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    made.embedding = nn.Embedding(3, 2)
    return made


@pytest.mark.parametrize(
    ("change", "prepare"),
    [
        (None, with_lora), (None, lambda model: model), (None, with_a_part(Frozen)), (None, with_a_part(Backwards)),
        (eval_of_a_part, with_lora), (eval_of_all, with_lora), (eval_of_all, with_a_part(Frozen)), (added, with_lora),
        (added_below_the_modules_of_torch, with_lora), (replaced, with_a_part(dropouts)),
        (removed, with_a_part(dropouts)), (frozen_later, with_lora), (a_method_of_an_instance, with_a_part(dropouts)),
        (another_class, with_a_part(dropouts)), (a_train_of_a_class, with_a_part(dropouts)),
        (a_parameter_is_added, with_lora), (a_parameter_is_shared, with_a_part(dropouts)),
        (a_parameter_is_resized, with_a_part(dropouts)), (an_embedding_becomes_a_layer, with_a_part(dropouts)),
    ],
)  # fmt: skip
def test_flags_and_operations_are_those_of_the_trainer(tmp_path, change, prepare):
    found = []
    for callbacks in ([], [kernels()]):
        trainer = trainer_of(tmp_path, Changes(change), *callbacks, prepare=prepare)
        trainer.train()
        assert len(trainer.seen) == 6
        asked = [module.asked for module in trainer.model.modules() if isinstance(module, Frozen)]
        found.append((trainer.seen, asked, trainer.state.total_flos, [m.training for m in trainer.model.modules()]))
    assert found[0][2] > 0
    assert found[1] == found[0]


def long_walks(run):
    """How often the functions of torch that walk over modules are entered while the Trainer is about them."""
    counted, walkers = Counter(), (nn.modules.module.__file__, repeats.__file__)

    def look(frame, event, _):
        if event == "call" and frame.f_code in WALKS:
            caller = frame.f_back
            while caller is not None and (caller.f_code.co_filename in walkers or caller.f_code.co_name == "train"):
                caller = caller.f_back
            if caller is not None and caller.f_code.co_name in ("training_step", "_run_epoch", "num_parameters"):
                counted[caller.f_code.co_name] += 1

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def test_the_long_walks_are_gone(tmp_path):
    plain = long_walks(trainer_of(tmp_path).train)
    ours = long_walks(trainer_of(tmp_path, kernels()).train)
    modules = len(list(trainer_of(tmp_path).model.modules()))
    # Six micro-batches of three steps.
    assert plain["training_step"] >= 6 * modules
    assert plain["num_parameters"] >= 12 * modules
    assert plain["_run_epoch"] >= 3 * modules
    # What transformers counts once, and classes with a `train` of their own with their children that have none.
    own_ways = [m for m in trainer_of(tmp_path).model.modules() if type(m).train is not nn.Module.train]
    leaves = sum(not child._modules for module in own_ways for child in module.children())
    assert ours["num_parameters"] == plain["num_parameters"] / 6
    assert ours["training_step"] == 6 * (len(own_ways) + leaves)
    assert ours["_run_epoch"] == 0


def test_gradients_are_zeroed(tmp_path):
    class Holds(TrainerCallback):
        found = ()

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            assert any(each.grad is not None for each in model.parameters())

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.found = (*self.found, *[each.grad for each in model.parameters()])

    holds = Holds()
    trainer_of(tmp_path, holds, kernels()).train()
    assert set(holds.found) == {None}


class Looks(TrainerCallback):
    """Looks at every event for what the modules must not keep."""

    def __init__(self):
        self.looked = Counter()

    def look(self, name, model):
        self.looked[name] += 1
        for module in model.modules():
            assert not set(LENT) & set(vars(module)), name
        copy.deepcopy(model)


for event in ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "evaluate", "log"):

    def look(self, args, state, control, model=None, _name=event, **kwargs):
        self.look(_name, model)

    setattr(Looks, f"on_{event}", look)


@pytest.mark.parametrize("looks_first", [True, False])
def test_nobody_finds_a_method_that_is_lent(tmp_path, looks_first):
    looks = Looks()
    trainer = trainer_of(tmp_path, *([looks, kernels()] if looks_first else [kernels(), looks]))
    original = trainer.compute_loss

    def compute_loss(model, *args, **kwargs):
        looks.look("loss", model)
        return original(model, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert len(looks.looked) == 8
    looks.look("end", trainer.model)
    assert not set(METHODS) & set(vars(trainer))


def test_what_a_loop_does_not_call_is_taken_back_when_the_step_ends(tmp_path):
    class Leaves(TrainerCallback):
        left = 0

        def on_step_end(self, args, state, control, model=None, **kwargs):
            ours.on_optimizer_step(args, state, control)
            trainer._get_learning_rate()
            self.left += "zero_grad" in vars(model)

    leaves, ours, looks = Leaves(), kernels(), Looks()
    trainer = trainer_of(tmp_path, leaves, ours, looks)
    trainer.train()
    assert leaves.left == looks.looked["step_end"] == 3


def planted(*_, **__):
    raise RuntimeError("planted")


@pytest.mark.parametrize("where", ["before", "loss", "rate", "count", "part"])
def test_all_is_taken_back_after_a_failure(tmp_path, where):
    trainer = trainer_of(tmp_path, kernels(), prepare=with_a_part(Backwards))
    held = []
    if where == "before":
        trainer._prepare_context_parallel_inputs = planted
    elif where == "loss":
        trainer.compute_loss = planted
    elif where == "count":
        Count = type("Inputs", (dict,), {"numel": planted})
        trainer.floating_point_ops = lambda inputs: Count().numel()
    elif where == "rate":
        # Between the learning rate and the gradients.
        original = trainer.create_scheduler

        def create_scheduler(*args, **kwargs):
            made = original(*args, **kwargs)
            made.step = lambda *_: held.append("zero_grad" in vars(trainer.model)) or planted()
            return made

        trainer.create_scheduler = create_scheduler
    else:
        layer(trainer.model).late[0].train = planted
    before = {name: vars(trainer).get(name) for name in METHODS}
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert held == ([True] if where == "rate" else [])
    for name, module in trainer.model.named_modules():
        own = set(LENT) & set(vars(module))
        assert own == ({"train"} if where == "part" and name.endswith("late.0") else set()), name
    assert {name: vars(trainer).get(name) for name in METHODS} == before


def test_a_count_of_the_users_is_asked_each_time(tmp_path):
    model = small_model("qwen3")
    asked = []

    class Counts(type(model)):
        def num_parameters(self, *args, **kwargs):
            asked.append(kwargs["exclude_embeddings"])  # what it reads by name, transformers' reads, too
            return sum(asked)

    def prepare(_):
        model.__class__ = Counts
        return model

    trainer = trainer_of(tmp_path, kernels(), prepare=prepare)
    trainer.train()
    assert asked == [True] * 6
    assert trainer.state.total_flos == 6 * 2 * 17 * sum(range(1, 7))


def test_parameters_of_four_bits_are_counted_as_ever(monkeypatch):
    class Params4bit(nn.Parameter):
        pass

    module = types.ModuleType("bitsandbytes")
    module.nn = types.SimpleNamespace(Params4bit=Params4bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    model, count = small_model("qwen3"), repeats._Count()
    assert count.applies_to(model.num_parameters)

    def same():
        expected = model.num_parameters(exclude_embeddings=True)
        assert count.number(model.num_parameters, exclude_embeddings=True) == expected
        return expected

    weight = layer(model).mlp.up_proj.weight
    model.is_loaded_in_4bit = True
    found = [same()]
    weight.__class__ = Params4bit
    found.append(same())
    weight.data = weight.data.half()
    found.append(same())
    model.is_loaded_in_4bit = False
    found.append(same())
    assert [each - found[0] for each in found] == [0, 7 * weight.numel(), 3 * weight.numel(), 0]


def test_what_is_asked_of_the_count_counts():
    model, count = with_lora(small_model("qwen3")).base_model.model, repeats._Count()
    found = []
    for embeddings, trained, trainable in itertools.product((True, False), repeat=3):
        layer(model).mlp.requires_grad_(trained)
        arguments = {"only_trainable": trainable, "exclude_embeddings": embeddings}
        expected = model.num_parameters(**arguments)
        assert count.number(model.num_parameters, **arguments) == expected
        found.append(expected)
    assert len(set(found)) >= 4
    assert all(a != b for a, b in itertools.pairwise(found))


def test_the_place_and_the_name_of_a_parameter_count():
    model, count, found = small_model("qwen3"), repeats._Count(), []
    layer(model).late = part = nn.Sequential(nn.Embedding(3, 2), nn.Dropout())
    weight = part[0].weight
    for place, name in ((0, "weight"), (0, "another"), (1, "weight"), (0, "weight")):
        part[0]._parameters.clear()
        part[1]._parameters.clear()
        part[place]._parameters[name] = weight
        found.append(model.num_parameters(exclude_embeddings=True))
        assert count.number(model.num_parameters, exclude_embeddings=True) == found[-1]
    assert [each - found[0] for each in found] == [0, 6, 6, 0]


def test_a_count_of_a_later_transformers_that_reads_more_is_asked_each_time(monkeypatch):
    model = small_model("qwen3")
    assert repeats._Count.applies_to(model.num_parameters)

    def num_parameters(self, only_trainable=False, exclude_embeddings=False):
        return self.config.num_active

    num_parameters.__module__ = "transformers.modeling_utils"
    monkeypatch.setattr(type(model), "num_parameters", num_parameters)
    assert not repeats._Count.applies_to(model.num_parameters)


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "_named_members", "named_modules"])
def test_a_walk_of_everybodys_is_taken(tmp_path, monkeypatch, name):
    original, taken = getattr(nn.Module, name), Counter()

    def own(self, *args, **kwargs):
        caller = sys._getframe(1)
        while caller is not None and caller.f_code.co_name not in ("num_parameters", "_run_epoch"):
            caller = caller.f_back
        taken[caller and caller.f_code.co_name] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, name, own)
    trainer = trainer_of(tmp_path, kernels())
    model = trainer.model.base_model.model
    model.num_parameters(exclude_embeddings=True)
    once = taken["num_parameters"]
    taken.clear()
    trainer._clip_grad_norm = lambda model: None  # walks as well
    trainer._get_grad_norm = lambda model, grad_norm=None: None
    trainer.args.eval_strategy = "no"
    trainer.train()
    assert taken["num_parameters"] == 6 * once
    assert taken["_run_epoch"] >= 3


class Hides(nn.Sequential):
    """Shows its modules if it is asked to."""

    shows = True

    def named_modules(self, *args, **kwargs):
        return super().named_modules(*args, **kwargs) if self.shows else iter(())


def hides_by_itself():
    made = nn.Sequential(nn.Linear(2, 2))
    made.shows = True
    made.__dict__["named_modules"] = lambda *args, **kwargs: (
        nn.Module.named_modules(made, *args, **kwargs) if made.shows else iter(())
    )
    return made


@pytest.mark.parametrize("make", [lambda: Hides(nn.Linear(2, 2)), hides_by_itself])
def test_modules_that_are_named_in_another_way_are_named_so(make):
    model, count = small_model("qwen3"), repeats._Count()
    layer(model).late = part = make()
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    part.shows = False
    repeats._zero(model)
    assert [each.grad is None for each in model.model.embed_tokens.parameters()] == [True]
    assert [each.grad is None for each in nn.ModuleList([part[0]]).parameters()] == [False, False]
    found = []
    for part.shows in (True, False):
        found.append(count.number(model.num_parameters))
        assert found[-1] == model.num_parameters()
    assert found[0] - found[1] == 6


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "_named_members", "named_modules"])
@pytest.mark.parametrize("of_the_class", [True, False])
def test_a_walk_of_the_models_own_is_taken(name, of_the_class):
    model, count, taken = small_model("qwen3"), repeats._Count(), []

    def own(self, *args, **kwargs):
        taken.append(name)
        return getattr(nn.Module, name)(self, *args, **kwargs)

    if of_the_class:
        model.__class__ = type("Own", (type(model),), {name: own})
    else:
        vars(model)[name] = types.MethodType(own, model)
    repeats._zero(model)
    assert taken
    for arguments in ({}, {}):
        taken.clear()
        model.num_parameters(**arguments)
        expected = len(taken)
        taken.clear()
        count.number(model.num_parameters, **arguments)
        assert len(taken) == expected


def test_gradients_are_kept_as_zeros_or_left_where_torch_does_so():
    model = nn.Sequential(nn.Linear(2, 2))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    model._is_replica = True
    with pytest.warns(UserWarning, match="no effect"):
        repeats._zero(model)
    model[0].weight.grad, model[0].bias.grad = (torch.ones_like(each) for each in model.parameters())
    del model._is_replica
    repeats._zero(model, set_to_none=False)
    assert [each.grad.abs().sum() for each in model.parameters()] == [0, 0]


@pytest.mark.parametrize("of_the_class", [True, False])
def test_a_zero_grad_of_the_users_is_called(tmp_path, of_the_class):
    called = []

    def zero_grad(self, *args):
        called.append(args)
        nn.Module.zero_grad(self)

    def prepare(model):
        if of_the_class:
            model.__class__ = type("Zeroes", (type(model),), {"zero_grad": zero_grad})
        else:
            vars(model)["zero_grad"] = types.MethodType(zero_grad, model)
        return model

    trainer = trainer_of(tmp_path, kernels(), prepare=prepare)
    trainer.train()
    # Before the first step, and after each.
    assert called == [()] * 4
    assert ("zero_grad" in vars(trainer.model)) is not of_the_class


def tree():
    shared, twice = nn.Sequential(nn.Dropout(), Frozen()), Frozen()
    root = nn.Sequential(shared, nn.ModuleDict({"a": twice, "b": twice}), nn.ModuleList([shared, Backwards()]))
    root.nothing = None
    root._modules["none"] = None
    root.add_module("compiled", torch.compile(nn.Sequential(nn.Sequential(nn.Dropout())), backend="eager"))
    root.scripted = torch.jit.script(nn.Sequential(nn.Sequential(nn.Dropout())))
    return root


class Property(nn.Dropout):
    written = ()
    training = property(lambda self: bool(self.written), lambda self, mode: self.write(mode))

    def write(self, mode):
        self.__dict__["written"] = (*self.written, mode)


class Selects(nn.Sequential):
    def children(self):
        return iter([self[1]])


class Names(nn.Sequential):
    def named_children(self):
        yield "1", self[1]


class Writes(nn.Sequential):
    def __setattr__(self, name, value):
        super().__setattr__(name, not value if name == "training" else value)


def of_an_instance(name):
    def make():
        made = nn.Sequential(nn.Sequential(nn.Dropout()), nn.Sequential(nn.Dropout()))
        chosen = {"children": lambda: iter([made[1]]), "named_children": lambda: iter([("1", made[1])])}
        made.__dict__[name] = chosen[name]
        return made

    return make


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        tree, lambda: nn.Sequential(Property()), Frozen, of_an_instance("children"), of_an_instance("named_children"),
        *(lambda cls=cls: nn.Sequential(cls(nn.Dropout(), nn.Dropout()), nn.Dropout())
          for cls in (Selects, Names, Writes)),
    ],
)  # fmt: skip
def test_train_is_torchs(make, mode):
    found = []
    for lend in (False, True):
        root = make()
        for place, module in enumerate(root.modules()):
            if not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["training"] = not mode if place < 4 else place % 2 == 0
        if lend:
            assert repeats._lend_train(root) is not None
        assert root.train(mode) is root
        assert "train" not in vars(root)
        told = [getattr(module, "asked", getattr(module, "written", None)) for module in root.modules()]
        found.append((told, [module.training for module in root.modules()]))
    assert found[0] == found[1]


def test_what_torch_refuses_is_refused():
    root = nn.Sequential(nn.Dropout())
    repeats._lend_train(root)
    with pytest.raises(ValueError, match="expected to be boolean"):
        root.train(1)
    buffered = nn.Sequential(nn.Sequential(nn.Dropout()))
    del buffered[0][0].training
    buffered[0][0].register_buffer("training", torch.zeros(1))
    repeats._lend_train(buffered)
    with pytest.raises(TypeError, match="as buffer 'training'"):
        buffered.train()
    root[0].root = root
    repeats._lend_train(root)
    with pytest.raises(RecursionError):
        root.train()


def test_torchs_methods_are_known(monkeypatch):
    assert all(repeats._is_torchs(name) for name in repeats._TORCHS)
    original = nn.Module.train

    def train(self, mode=True):
        return original(self, mode)

    monkeypatch.setattr(nn.Module, "train", train)
    assert not repeats._is_torchs("train")


def test_a_train_of_everybodys_is_called(tmp_path, monkeypatch):
    original, called = nn.Module.train, []

    def train(self, mode=True):
        called.append(self)
        return original(self, mode)

    monkeypatch.setattr(nn.Module, "train", train)
    trainer, found = trainer_of(tmp_path, kernels(), max_steps=1), []
    original_loss = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        found.append(set(called))
        loss = original_loss(*args, **kwargs)
        called.clear()
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    assert found[1] == set(trainer.model.modules())


def test_sft(tmp_path):
    found = []
    for callbacks in ([], [kernels()]):
        trainer = SFTTrainer(
            small_model("qwen3"),
            args=SFTConfig(output_dir=str(tmp_path), eval_strategy="steps", eval_steps=2, **COMMON),
            train_dataset=Dataset.from_dict({"text": SUMS}), eval_dataset=Dataset.from_dict({"text": SUMS[:2]}),
            peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear"), processing_class=tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        found.append((trainer.state.total_flos, [module.training for module in trainer.model.modules()]))
    assert found[0][0] > 0
    assert found[0] == found[1]


def test_grpo(tmp_path):
    found = []
    for callbacks in ([], [kernels()]):
        trainer = train(GRPOTrainer, tmp_path, extra={"callbacks": callbacks}, max_steps=2)
        found.append((trainer.state.total_flos, [module.training for module in trainer.model.modules()]))
        assert not set(METHODS) & set(vars(trainer))
    assert found[0] == found[1]
