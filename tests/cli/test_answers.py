"""What a run left stays as it is, whatever is asked of its folder and in whatever state that is."""

import argparse
import re
import shutil
from pathlib import Path

import jax
import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig, Trainer
from dflop_jax.cli.experiment import answer_name
from dflop_jax.cli.main import COMMANDS
from dflop_jax.contract import edges_of
from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE
from dflop_jax.records import Plan
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import RunFolder, answer_folder
from models import llava
from tests.cli.command_line import refused, run
from tests.plans import NANO, nano_profile

MODEL = llava.build("anyres-nano")
PROFILE, PLAN = ("--profile-file", "nano_profile.json"), ("--plan-file", "nano_plan.json")
PROFILE_NAME = "profile_file-nano_profile.json"
# Of what is measured or predicted; the last where XLA's compiler for GPUs is not installed.
TOLD = ("devices: ", "data: ", "predicting times", "prices come from data sheets")
ABSENT = ("--plan.hardware", "h100", "--plan.devices", "8")
# Of each command: what it is asked of the folder "run", its exit code, and what it leaves.
ASKED = {
    "profile": [(("nano.py", *ABSENT), 0, "run/profile-nano-plan.devices-8-plan.hardware-h100")],
    "plan": [
        (("nano.py", *PROFILE), 0, "run/plan-nano-profile_file-nano_profile.json"),
        (("nano.py", *PROFILE, "--plan.policy", "blind", "--out", "aside"), 0, "aside"),
        (("nano.py", *PROFILE, "--out", "run"), 2, ""),
    ],
    "compile": [(("nano.py", *ABSENT, "--out", "run/plan.json"), 2, "")],
    "simulate": [
        (("nano.py", *PROFILE, *PLAN, "--batches", "1"), 0,
         "run/simulate-nano-profile_file-nano_profile.json-plan_file-nano_plan.json-batches-1"),
    ],
    "report": [
        (("run",), 0, "run/report.png"),
        (("run", "other"), 0, "compare.png"),
        (("run", "other", "--out", "run/loss.png"), 2, ""),
        (("run", "--out", "run/pages/one.html"), 0, "run/pages/one.png"),
    ],
    "train": [(("nano.py", *PROFILE, *PLAN), 2, "")],
    "generate": [(("run", "--prompt", "What?", "--max-tokens", "2"), 0, "")],
    "export": [
        (("run", "--out", "published"), 0, "published"),
        (("run", "--out", "run"), 2, ""),
        (("run", "--out", "nano.py/there"), 2, ""),
    ],
    "verify": [(("published", "--json"), 0, "")],
    "check": [(("nano.py", "--page", "run/page.txt"), 0, "run/page.txt"),
              (("nano.py", "--page", "run/summary.md"), 2, "")],
    "init": [(("mine.py", "--model.size", "nano"), 0, "mine.py")],
    "launch": [(("-n", "1", "--", "python", "-c", "pass"), 0, "")],
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder as a short run leaves it."""
    folder = tmp_path_factory.mktemp("finished")
    jax.devices()
    config = Config(
        model=ModelConfig(size="anyres-nano"),
        data=DataConfig(n_samples=64, max_tiles=2, max_frames=4, max_tokens=128, workers=1),
        plan=PlanConfig(policy="dflop", devices=2, max_model=1),
        train=TrainConfig(steps=2, global_batch=8),
        run_dir=str(folder / "run"),
        cache_dir=str(folder / "cache"),
    )
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    Trainer(config, plan=plan, profile=nano_profile()).fit()
    return folder / "run"


@pytest.fixture
def left(finished):
    """The files of the run, in "run"."""
    shutil.copytree(finished, "run")
    shutil.copytree(finished, "other")
    return files("run")


def files(folder):
    """The bytes of every file below a folder, by path."""
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def changed(left):
    """The names of those files that are no longer as they were."""
    now = files("run")
    return [name for name, data in left.items() if now.get(name) != data]


@pytest.mark.slow(first=2)
@pytest.mark.filterwarnings("ignore:os.fork")  # dflop launch itself does not import jax
@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_every_command_leaves_a_finished_run_as_it_was(left, capsys, monkeypatch, command):
    if command == "verify":
        run(capsys, "export", *ASKED["export"][0][0])
    for args, code, wrote in ASKED[command]:
        assert not wrote or not Path(wrote).exists()
        if code:
            assert "--out" in (line := refused(capsys, command, *args)) or "--run_dir" in line
        else:
            code, _, err = run(capsys, command, *args)
            assert code == 0
            assert [line for line in err.splitlines() if not line.startswith(TOLD)] == []
        assert Path(wrote).exists()
        assert changed(left) == []


def test_an_answer_holds_what_was_asked(left, capsys):
    plan, simulate = ASKED["plan"][0], ASKED["simulate"][0]
    run(capsys, "plan", *plan[0])
    run(capsys, "plan", *plan[0], "--plan.policy", "blind")
    run(capsys, "simulate", *simulate[0])
    assert load(Plan, f"{plan[2]}/plan.json").policy == "dflop"
    assert load(Plan, f"run/plan-nano-plan.policy-blind-{PROFILE_NAME}/plan.json").policy == "blind"
    assert load(Plan, f"{simulate[2]}/plan.json") == NANO
    code, _, err = run(capsys, "report", "run", simulate[2], "--out", "both.html")
    assert (code, err) == (0, "")
    assert "simulated, no step trained" in Path("both.html").read_text()
    with pytest.raises(ValueError, match="holds a run, whose records stay; choose another --run_d"):
        answer_folder("run", "../other")
    assert changed(left) == []


def test_names_of_questions(capsys):
    asked = {}
    for options in ({}, {"plan.policy": "blind"}, {"data.path": "a/b"}, {"data.path": "a-b"},
                    {"data.path": "x" * 300}, {"data.path": "x" * 299}):  # fmt: skip
        for experiment in ("nano.py", "far/other.py"):
            args = {"command": "plan", "experiment": experiment, "run_dir": "elsewhere", **options}
            asked[answer_name(argparse.Namespace(**args, json=True, run=print))] = args
    assert len(asked) == 12
    assert {"plan-nano", "plan-other-plan.policy-blind"} < asked.keys()
    assert all(re.fullmatch(r"[\w.-]{1,130}", name) for name in asked)


# ---- the folder of a running one, of another version, of a damaged one ----


def test_a_running_run_is_not_disturbed(left, capsys):
    with RunFolder("run", existing="resume"):
        said = refused(capsys, "train", *ASKED["train"][0][0], exit_code=TRANSIENT_FAILURE)
        assert "another run is writing to it" in said
        for command in ("simulate", "report", "export"):
            args, code, wrote = ASKED[command][0]
            assert run(capsys, command, *args)[::2] == (code, "")
            assert Path(wrote).exists()
            assert changed(left) == []


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: data.index(b":", len(data) // 2)],  # never at the end of a row
    "list": lambda data: b"[1]",
    "numbers as texts": lambda data: re.sub(rb": ?[0-9.]+", b':"x"', data),
    "noise": lambda data: bytes(255 - b for b in data),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["profile.json", "plan.json", "metrics.jsonl", "trace.json"])
def test_the_report_of_a_damaged_run(left, capsys, name, damage):
    end = b"\n" if name == "metrics.jsonl" else b""  # or its last line counts as cut by a kill
    Path("run", name).write_bytes(DAMAGES[damage](left[f"run/{name}"]) + end)
    left = files("run")
    code, _, err = run(capsys, "report", "run")
    if name == "profile.json":  # of which only memory over time comes
        assert (code, err) == (0, "")
        assert f"memory over time is not known: run/{name}: " in Path("run/report.html").read_text()
    else:
        assert (code, err.count("\n")) == (2, 1)
        assert f"run/{name}:" in err
    assert changed(left) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_answers_of_a_run_whose_configuration_is_damaged(left, capsys, damage):
    Path("run/config.json").write_bytes(DAMAGES[damage](left["run/config.json"]))
    assert "run/config.json: not a configuration" in refused(
        capsys, "generate", *ASKED["generate"][0][0]
    )


def test_a_run_whose_only_checkpoint_is_damaged(left, capsys):
    for file in Path("run/checkpoints").rglob("*.*"):
        file.write_bytes(DAMAGES["noise"](file.read_bytes()))
    left = files("run")
    for command in ("generate", "export"):
        args, _, wrote = ASKED[command][0]
        code, out, err = run(capsys, command, *args)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].endswith("use another run, or train it again")
        assert "Traceback" not in err
        assert not wrote or not Path(wrote).exists()
    assert changed(left) == []
