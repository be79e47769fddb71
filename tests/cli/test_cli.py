"""The `dflop` command from the outside: exit codes, one line per mistake, and a short real run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dflop_jax.cli.main import COMMANDS
from dflop_jax.config import fields
from dflop_jax.records import Plan, Profile
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.report.wall_time import read_wall_time
from dflop_jax.runtime.executor import Executor
from tests.cli.command_line import refused, run
from tests.data.media_cases import noise, write_clip
from tests.plans import NANO, nano_profile

# ---- mistakes in the command line ----


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "exp.py: no such experiment file; give a path such as experiments/demo.py"),
        ("", "exp.py: defines no config() that returns a dflop_jax.Config"),
        ("def config(:\n", "exp.py, line 1: SyntaxError: invalid syntax"),
        (
            "\nimport nowhere_to_be_found\n",
            "exp.py, line 2: ModuleNotFoundError: No module named 'nowhere_to_be_found'; repair",
        ),
        ("def config():\n    return 1 / 0\n", "exp.py, line 2: ZeroDivisionError: division by"),
        (
            "from dflop_jax import Config, TrainConfig\n"
            "def config():\n    return Config(train=TrainConfig(steps=0))\n",
            "exp.py, line 3: train.steps=0 must be at least 1; repair the file",
        ),
        (
            "from dflop_jax import Config, TrainConfig\n"
            "def config():\n    return Config(train=TrainConfig(decay_steps=9))\n",
            "exp.py: train.decay_steps=9 has an effect only with train.schedule wsd; set that, or",
        ),
    ],
)
def test_experiment_files_that_are_wrong(capsys, text, says):
    if text is not None:
        Path("exp.py").write_text(text)
    assert says in refused(capsys, "train", "exp.py")


def test_help_has_every_command_and_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = run(capsys, "--help")[1]
    assert all(c.name in out for c in COMMANDS)
    assert "3 preempted" in " ".join(out.split())
    code, out, err = run(capsys, "train", "--help")
    assert (code, err) == (0, "")
    out = " ".join(out.split())
    assert all(f"--{leaf.name} " in out and leaf.help in out for leaf in fields())
    words = set(re.split(r"[ ,\[\]|]+", out.replace("...", " ")))
    assert not words & {"STR", "INT", "FLOAT", "BOOL", "TUPLE", "LIST"}
    for text in ("--train.freeze NAME[,NAME...]", "train.lora_ranks PATTERN=RANK[,PATTERN=RANK",
                 "--data.root FOLDER[,FOLDER...]", "--plan.memory_bytes SIZE", "exit code 3",
                 "(default: auto)", "--json", "EXPERIMENT"):  # fmt: skip
        assert text in out


# ---- commands that work ----


def planned(capsys, *args):
    return run(capsys, *args, "nano.py", "--profile-file", "nano_profile.json")


def test_plan_writes_a_plan_that_loads(capsys):
    code, out, err = planned(capsys, "plan")
    assert (code, err) == (0, "")
    assert "wrote run/plan.json" in out
    assert "candidates simulated" in out
    assert re.search(r"expected: 3 steps in [\d.]+ s, [\d.,]+ tokens/s of llm\n", out)
    assert re.search(r"ms a\s+step\s+\([\d.]+\s+ms\s+with\s+one\s+bucket,\s+as\s+ranked\)", out)
    plan = load(Plan, "run/plan.json")
    assert plan.layout.n_devices == 2
    assert load(Profile, "run/profile.json") == nano_profile()
    code, out, _ = planned(capsys, "plan", "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["plan"]["policy"] == "dflop"
    assert {"policy", "makespan_s", "busy_s", "peak_bytes"} <= set(printed["candidates"][0])
    assert load(Plan, "run/plan.json") == plan


def test_simulate_writes_a_picture_and_json(capsys):
    files = ("--plan-file", "nano_plan.json", "--batches", "2")
    code, out, _ = planned(capsys, "simulate", "--json", *files)
    assert code == 0
    summary = json.loads(out)
    assert summary["step_s"] == pytest.approx(summary["makespan_s"] / 2)
    assert set(summary["busy_fraction"]) == {"vision", "llm"}
    assert Path("run/simulated.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(Path("run/simulated.json").read_text())["traceEvents"]


QWEN = ("--model.factory", "models.qwen3_vl:build", "--model.size")


def ask(content, **more):
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "An answer."}]
    return {"messages": talk, **more}


BAD = {
    "a picture too thin": (ask("<image>?", image="thin.png"), "picture of 10000x1 pixels"),
    "a clip of one frame": (ask("<video>?", video="one.mp4"), "a clip of 1 frames of 64x48"),
    "no content": (ask(None), "message 0 (of user) has no content"),
    "a tag alone": (ask("<image> and <image>?", image="good.png"), "2 <image> tags for 1 images"),
    "a picture alone": (ask("What?", image="good.png"), "0 <image> tags for 1 images"),
}


def make_media():
    Image.fromarray(noise(1, 10_000)).save("thin.png")
    Image.fromarray(noise(40, 60)).save("good.png")
    write_clip(Path("one.mp4"), 1)


def write(*records):
    Path("d.json").write_text(json.dumps(records))
    return ("--data.path", "d.json")


def test_each_is_named_and_the_others_go_on(capsys, caplog, monkeypatch):
    known = nano_profile().model  # to time a model is another test's matter
    monkeypatch.setattr("dflop_jax.train.profiling.profile_model", lambda *_: known)
    make_media()
    good = ask("<image>?", image="good.png")
    data = write(good, *(record for record, _ in BAD.values()), good, good)
    limits = ("--data.max_bad_fraction", "0.5", "--data.max_tokens", "512")
    code, _, err = run(capsys, "profile", "nano.py", *QWEN, "qwen3-vl-tiny", *data, *limits)
    assert code == 0, err
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    for k, (_, why) in enumerate(BAD.values(), 1):
        (line,) = [x for x in lines if f"d.json[{k}]" in x]
        assert why in line
        assert "\n" not in line
    profile = json.loads(Path("run/profile.json").read_text())["value"]
    assert profile["data"]["n_total"] == 3


RUN_FILES = {"config.json", "profile.json", "plan.json", "metrics.jsonl", "trace.json",
             "timeline.png", "loss.png", "events.jsonl", "summary.md"}  # fmt: skip


def test_train_end_to_end_and_again_bit_for_bit(capsys, monkeypatch):
    files = ("--plan-file", "nano_plan.json", "--profile-file", "nano_profile.json")
    files += ("--model.factory", "tests.small:build")
    code, out, err = run(capsys, "train", "nano.py", "--json", *files)
    assert code == 0, err
    said = json.loads(out)
    rows = read_metrics("run")
    assert {p.name for p in Path("run").iterdir() if p.is_file()} >= RUN_FILES
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert [r["compiles"] for r in rows[1:]] == [0, 0]
    assert said["compiles_after_warmup"] == 0
    assert (said["first_loss"], said["last_loss"]) == (rows[0]["loss"], rows[-1]["loss"])
    assert set(rows[0]["busy_fraction"]) == set(rows[0]["padding_fraction"]) == {"vision", "llm"}
    assert all(0 <= f < 1 for r in rows for f in r["padding_fraction"].values())
    assert all(r["supervised_tokens"] > 0 and r["grad_norm"] > 0 for r in rows)
    assert load(Plan, "run/plan.json").layout.submeshes == NANO.layout.submeshes
    assert json.loads(Path("run/config.json").read_text())["train"]["steps"] == 3
    assert "makespan" in Path("run/summary.md").read_text()
    spent = read_wall_time("run")
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s)
    assert {"start", "compile", "training", "end"} <= spent.seconds.keys()

    # The same again, on a machine whose clock shows other times: measured seconds may differ from
    # run to run, so nothing that reaches the parameters may depend on them.
    measured = Executor.calibrate

    def other_times(self, *args, **kwargs):
        runs = measured(self, *args, **kwargs)
        return [r if i % 2 or r.device_s is None else replace(r, device_s=10 * r.device_s)
                for i, r in enumerate(runs)]  # fmt: skip

    monkeypatch.setattr(Executor, "calibrate", other_times)
    code, _, err = run(capsys, "train", "nano.py", "--run_dir", "again", *files)
    assert code == 0, err
    assert [r["loss"] for r in read_metrics("again")] == [r["loss"] for r in rows]

    code, out, _ = run(capsys, "report", "run", "again", "--json", "--out", "both.png")
    assert code == 0
    assert [r["name"] for r in json.loads(out)["runs"]] == ["run", "again"]
    assert Path("both.png").read_bytes()[:4] == b"\x89PNG"
    code, out, _ = run(capsys, "report", "run")
    assert code == 0
    assert "dflop" in out

    # A run in the folder is only replaced when told so.
    assert "another run" in refused(capsys, "train", "nano.py", *files)
