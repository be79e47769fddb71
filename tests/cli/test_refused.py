"""What no measurement would change is refused before anything is measured."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

from dflop_jax.aot import chip_profile
from dflop_jax.records import SubmeshPlan
from dflop_jax.records.files import save
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import profiling
from tests.cli.command_line import refused
from tests.front.wrong_lines import WRONG, careless_folder
from tests.plans import NANO, bucket

MEASURE, PLAN = ("train", "plan", "simulate", "profile"), ("train", "plan", "simulate")
ANSWERS, TRAIN, SIMULATE = ("plan", "simulate", "profile"), ("train",), ("simulate",)
SMALL = ("--model.factory", "tests.small:build")
PROFILE = "--profile-file nano_profile.json"
VISION, LLM = NANO.layout.segments
FILES = {
    "deep.json": {"segments": (VISION, dataclasses.replace(LLM, stop=6))},
    "far.json": {"submeshes": (NANO.layout.submeshes[0], SubmeshPlan("llm", 1, 1, 15, 1))},
    "odd.json": {"submeshes": (NANO.layout.submeshes[0], SubmeshPlan("llm", 1, 1, 1, 5))},
    "short.json": {"buckets": (bucket(1, 1),)},
}
BAD_FILES = {
    "empty.json": "",
    "none.json": "[]",
    "broken.json": '[{"conversations": [',
    "broken.jsonl": '{"conversations": []}\n{"conversations"\n',
    "full/thesis.tex": "",
    "begun/metrics.jsonl": '{"step":0,"step_s":1.0}\n',
}
CASES = [
    (MEASURE, "--train.step 3", "unknown override train.step; did you mean train.steps?"),
    (TRAIN, "--train.steps many", "Expected `int`, got `str` - at `train.steps`"),
    (TRAIN, "--train.steps 0", "train.steps=0 must be at least 1"),
    (MEASURE, "stray", "unexpected argument 'stray'"),
    (TRAIN, "--train.steps", "expected one argument"),
    (TRAIN, "--train.steps 3 --train.steps=4", "--train.steps: is given twice; give it once"),
    (TRAIN, "--train.lora_alpha 16", "has an effect only with train.lora_rank; set that, or lea"),
    (TRAIN, "--train.warmup_steps 4", "is longer than the run of 3 steps; set train.warmup_st"),
    (MEASURE, "--run_dir full", "full: holds thesis.tex and no run; choose a new or empty folder"),
    (MEASURE, "--run_dir /", "and no run; choose a new or empty folder as --run_dir"),
    (TRAIN, "--model.size huge --model.factory models.llava:build", "unknown model size 'huge'"),
    (TRAIN, "--model.factory models.llava:gone", "has no attribute 'gone'"),
    (TRAIN, "--model.factory models", "give MODULE:FUNCTION"),
    (TRAIN, "--model.attention_kernel fast", "'fast' is not one of auto, cudnn, pallas, xla"),
    (MEASURE, "--model.attention_kernel pallas", "the devices are cpu; leave it at auto"),
    (TRAIN, "--model.attention_kernel xla --model.factory models.composed:parse_dtype",
     "models.composed:parse_dtype has no kernels; leave it at auto"),
    (("plan",), f"{PROFILE} --train.remat named", "no price of the recompute policy 'named'"),
    (("plan",), f"{PROFILE} --plan.memory_bytes 1e4",
     "into 0.00 GiB per device: the smallest (vision=1x1x1@0"),
    *((("profile",), f"--data.path {file}", file) for file in list(BAD_FILES)[:4]),
    (("plan",), "--profile-file nano_plan.json", "nano_plan.json: contains Plan, expected Profile"),
    (PLAN, "--plan.devices 1", "policy dflop has no placement on 1 devices"),
    (PLAN, "--plan.policy dip --plan.max_stage 1", "policy dip has no placement on 2 devices"),
    (PLAN, "--plan.policy orch --plan.submeshes separate", "orch runs all modules on all devices"),
    (PLAN, "--plan.submeshes shared", "policy dflop puts modules on separate devices; use plan.p"),
    (PLAN, "--plan.policy auto --plan.submeshes separate --plan.devices 1", "plan has 1; raise"),
    (PLAN, "--plan.loop require", "loop=require: needs 3 devices, the plan has 2; raise plan"),
    (PLAN, "--plan.loop require --plan.devices 4 --plan.max_stage 1", "stage=1 equal stages"),
    (("plan", "simulate"), "--plan.hardware h100 --plan.devices 1", "has no placement on 1 dev"),
    (PLAN, "--plan.memory_bytes 1e4", "no plan fits into 0.00 GiB per device: parameters, grad"),
    (PLAN, "--train.remat named", "train.remat=named: the layers of 'vision' name no value"),
    (TRAIN, "--train.remat named --plan-file nano_plan.json", "train.remat=named: the layers of"),
    (MEASURE, "--run_dir nano.py", "nano.py: is a file; choose another --run_dir"),
    (MEASURE, "--cache_dir nano.py", "nano.py: is a file; choose another --cache_dir"),
    (ANSWERS, "--out nano.py", "nano.py: is a file; choose another --out"),
    (MEASURE, "--plan.devices 64", "plan.devices=64 but only 8 cpu devices exist"),
    (MEASURE, "--model.attention_kernel cudnn", "needs a GPU, the devices are cpu"),
    (MEASURE, "--model.factory nowhere:build", "No module named"),
    (MEASURE, "--train.lora_rank 4", "has no with_lora(rank, alpha)"),
    (MEASURE, "--train.freeze audio", "cannot freeze ['audio']; the model has"),
    (MEASURE, "--train.freeze vision,connector,llm", "every part of the model is frozen"),
    (MEASURE, "--train.learning_rates audio=1", "names 'audio', which the model does not have"),
    (MEASURE, "--data.path gone.json", "gone.json"),
    (MEASURE, "--data.tokenizer gone.json", "gone.json: no such tokenizer.json"),
    (MEASURE, "--data.factory nowhere:make", "data.factory='nowhere:make': No module named"),
    (MEASURE, "--data.factory tests.cli.test_refused:no_sample", "nothing: the dataset is empty"),
    (TRAIN, "--data.factory tests.cli.test_refused:none_held_out --train.eval_samples 4",
     "train.eval_samples=4, but nothing holds out no sample"),
    (TRAIN, "--plan.hardware h100 --plan.devices 2", "plans for devices that this machine lacks"),
    (TRAIN, "--plan.redecide_every 2 --checkpoint.every_s 0", "checkpoint.every_s=0 writes none"),
    (TRAIN, "--plan.policy orch --plan.trials 8", "plan.policy=orch has one"),
    (TRAIN, "--plan.policy auto --plan.trials 8 --checkpoint.every_s 0", "checkpoint after each"),
    (TRAIN, "--plan.policy auto --plan.trials 8 --train.steps 20", "give at most 6"),
    (TRAIN, "--plan.finalists 2", "unknown override plan.finalists; did you mean plan.trials?"),
    (TRAIN, "--checkpoint.keep_best true", "keep_best needs checkpoints and held-out losses"),
    (TRAIN, "--checkpoint.keep_best true --train.eval_samples 4 --checkpoint.every_s 0",
     "give checkpoint.every_s, train.eval_samples"),
    (TRAIN, "--train.profile_steps 3:4", "train.profile_steps=3:4, but with train.steps=3"),
    (TRAIN, "--train.wandb_project mine", "train.wandb_project needs wandb"),
    (TRAIN, "--model.weights gone", "gone: no such folder of weights or run"),
    (TRAIN, "--model.weights .", "this model has no published form; name a module instead"),
    (TRAIN, "--overwrite --resume auto", "not allowed with argument --overwrite"),
    (TRAIN, "--run_dir begun", "begun: holds the metrics of another run"),
    ((*TRAIN, *SIMULATE), "--plan-file gone.json", "gone.json: no such file"),
    ((*TRAIN, *SIMULATE), "--plan-file nano_profile.json", "contains Profile, expected Plan"),
    ((*TRAIN, *SIMULATE), "--plan-file deep.json", "covers 6 layers of 'llm', the model has 4"),
    (TRAIN, "--plan-file far.json", "submesh 'llm' needs devices 1..15 but only 2 exist"),
    (TRAIN, "--plan.devices 8 --plan-file odd.json", "does not divide by the degree model=5"),
    (TRAIN, "--plan-file short.json", "no sample of this data fits into the plan"),
    (PLAN, "--profile-file gone.json", "gone.json: no such file"),
    (SIMULATE, "--batches 0", "--batches: 0 must be at least 1"),
]  # fmt: skip


class Nothing:
    """A source without a sample."""

    name = "nothing"

    def __len__(self):
        return 0


def no_sample(config, model, split):
    return Nothing()


def none_held_out(config, model, split):
    from dflop_jax.data import MediaSpec, make_source

    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    return Nothing() if split == "eval" else make_source(config, spec, split)


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch):
    def measured(*args, **kwargs):
        raise AssertionError("something was measured")

    for module, name in (
        (profiling, "time_layers"),
        (profiling, "roofline_profile"),
        (chip_profile, "compile_probes"),
        (Executor, "compile"),
    ):
        monkeypatch.setattr(module, name, measured)


@pytest.mark.parametrize(
    "command, flags, says",
    [(command, flags, says) for commands, flags, says in CASES for command in commands],
)
def test_nothing_is_measured_for_what_is_refused(
    capsys, monkeypatch, tmp_path, command, flags, says
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    for file, changes in FILES.items():
        save(NANO.with_layout(**changes), tmp_path / file)
    for file, text in BAD_FILES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    small = () if SMALL[0] in flags or PROFILE in flags else SMALL
    assert says in refused(capsys, command, "nano.py", *small, *flags.split())
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "begun/metrics.jsonl").read_text() == BAD_FILES["begun/metrics.jsonl"]


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    return careless_folder(tmp_path_factory.mktemp("careless"))


@pytest.mark.parametrize("line", WRONG)
def test_one_line_says_what_and_how(careless, line, capsys, monkeypatch):
    monkeypatch.chdir(careless)
    assert WRONG[line] in refused(capsys, *line.split())
    assert not (careless / "mine.txt").exists()


@pytest.mark.parametrize("name", ["omni", "qwen3vl", "two_stages", "llava_onevision_7b"])
def test_an_experiment_runs_as_a_script(monkeypatch, capsys, name):
    file = Path(__file__).parents[2] / "experiments" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(file), "--train.steps", "many"])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(file), run_name="__main__")
    assert e.value.code == 2
    assert "dflop train: Expected `int`" in capsys.readouterr().err
