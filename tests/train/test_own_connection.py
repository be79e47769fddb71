"""Scripts that have called `jax.distributed.initialize` themselves are trained on as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflop_jax.distributed.processes import free_port

from .many import FOUR, LIMIT_S, STEPS, Jobs, environment, losses, undisturbed

SCRIPT = """
import importlib.util, sys
import jax
process, count, port, folder, run_dir, *flags = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("127.0.0.1:" + port, int(count), int(process))
from dflop_jax.config import override
from dflop_jax.records.files import load
from dflop_jax.records import Plan, Profile
from dflop_jax.train.trainer import Trainer
spec = importlib.util.spec_from_file_location("small", folder + "/small.py")
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)
values = dict(flag.split("=") for flag in flags)
if values.pop("started", None):
    jax.devices()
config = override(small.config(), {"run_dir": run_dir, **values})
trainer = Trainer(
    config, plan=load(Plan, folder + "/plan.json"), profile=load(Profile, folder + "/profile.json")
)
result = trainer.fit()
print("processes", jax.process_count(), "steps", len(result.losses))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory)


def run_scripts(folder: Path, *flags: tuple[str, ...]) -> list[tuple[int, str]]:
    """Exit code and output of each of two processes, which have these flags."""
    (folder / "script.py").write_text(SCRIPT)
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(p), "2", port, str(folder), *more],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for p, more in enumerate(flags)
    ]
    try:
        outputs = [p.communicate(timeout=LIMIT_S)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    return [(p.returncode, text) for p, text in zip(started, outputs, strict=True)]


def test_losses_are_those_of_a_launched_run(tmp_path, whole):
    jobs = Jobs.make(tmp_path / "jobs", FOUR)
    run_dir = str(tmp_path / "run")
    for code, text in run_scripts(jobs.folder, (run_dir,), (run_dir,)):
        assert code == 0, text
        assert f"processes 2 steps {STEPS}" in text
    assert losses(Path(run_dir)) == losses(whole)


@pytest.mark.parametrize(
    "first, second, says",
    [
        (["a"], ["b"], "process 1 was started with run_dir=b, process 0 with a; start all with"),
        (
            ["a"],
            ["a", "distributed.num_processes=3"],
            "distributed.num_processes=3, but this program has called "
            "jax.distributed.initialize() as process 1 of 2; leave the flag out",
        ),
    ],
)
def test_processes_that_disagree_are_told_in_a_line(tmp_path, monkeypatch, first, second, says):
    jobs = Jobs.make(tmp_path / "jobs", FOUR)
    monkeypatch.chdir(tmp_path)
    (_, hub), (code, other) = run_scripts(jobs.folder, tuple(first), tuple(second))
    assert code == 1, other
    assert sum(says in line for line in other.splitlines()) == 1, other
    assert "Check failure" not in hub


def test_jax_that_has_started_cannot_exchange_arrays_of_cpus(tmp_path):
    jobs = Jobs.make(tmp_path / "jobs", FOUR)
    for code, text in run_scripts(jobs.folder, ("a", "started=1"), ("a", "started=1")):
        assert code in (1, 2), text  # by itself, or told by the other
        assert "jax is in use already" in text
