"""Runs to resume, and what to compare them with."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.trainer import Trainer

from ..plans import NANO, bucket, nano_profile

STEPS = 12
PLAN = NANO.with_layout(buckets=(bucket(8, 160),))
NANO_MODEL = ModelConfig(size="nano")
CONFIG = Config(
    model=ModelConfig(factory="tests.small:build"),
    data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96),
    train=TrainConfig(steps=STEPS, global_batch=4, warmup_steps=2, eval_samples=4, eval_every=4),
    schedule=ScheduleConfig(correct=False),  # runs are compared that measure anew
    checkpoint=CheckpointConfig(every=3, keep=10),
)


CACHE: dict[str, str] = {}
WHOLE: list[Path] = []  # the folder of `whole`, once it is there


@pytest.fixture(scope="module")
def quick(compiled_once, tmp_path_factory):
    """Runs that time their programs once (sums follow from orders) and draw no pictures."""
    jax.devices()
    if not CACHE:
        CACHE["cache_dir"] = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "write_summary", lambda folder: None)
        yield


@pytest.fixture
def _in_a_folder_of_its_own(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(run_dir, existing="error", **sections):
    config = dataclasses.replace(CONFIG, run_dir=str(run_dir), **CACHE, **sections)
    return Trainer(config, plan=PLAN, profile=nano_profile(), existing=existing).fit()


@pytest.fixture(scope="module")
def whole(quick, tmp_path_factory):
    """The folder of a run that nothing interrupts, one for all files."""
    if not WHOLE:
        folder = tmp_path_factory.mktemp("whole") / "run"
        result = fit(folder)
        assert (result.steps_done, result.preempted) == (STEPS, False)
        WHOLE.append(folder)
    return WHOLE[0]


def steps_saved(folder) -> tuple[int, ...]:
    return CheckpointStore(Path(folder) / "checkpoints").steps()


def evaluations(folder) -> list[dict]:
    lines = (Path(folder) / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def essence(folder) -> list[tuple]:
    """What of the rows follows from configuration and data, not from the clock."""
    names = ("step", "loss", "losses", "grad_norm", "learning_rate", "supervised_tokens",
             "padding_fraction", "groups", "model_flops")  # fmt: skip
    return [tuple(str(row[n]) for n in names) for row in read_metrics(folder)]


def assert_as_whole(folder, whole) -> None:
    assert [row["step"] for row in read_metrics(folder)] == list(range(STEPS))
    assert essence(folder) == essence(whole)
    assert evaluations(folder) == evaluations(whole)


def copy_of(whole) -> Path:
    return Path(shutil.copytree(whole, "run"))


def as_killed(whole, *, saved: int, rows: int) -> Path:
    """A copy of the folder as a kill leaves it, in the middle of row number `rows`."""
    folder = copy_of(whole)
    for step in steps_saved(folder):
        if step > saved:
            shutil.rmtree(folder / f"checkpoints/{step:08d}")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:rows]) + lines[rows][:40])
    kept = [line for line in evaluations(folder) if line["step"] <= rows]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(e) + "\n" for e in kept))
    return folder


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def data_file(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/{step:08d}/process-00000"


def manifest(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/{step:08d}/manifest.json"


def refused(folder, existing="resume", *, kind: type[Exception] = ValueError, **sections) -> str:
    with pytest.raises(kind, match=r".+") as error:
        fit(folder, existing, **sections)
    assert "\n" not in str(error.value)
    return str(error.value)
