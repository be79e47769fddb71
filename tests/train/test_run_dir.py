"""Run folders, epochs, restarts, errors between processes, and caches of programs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from dflop_jax import Config, TrainConfig
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.processes import LAUNCH_ENV, RESTARTS_ENV
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.schedule.count_program import ProgramSizes, canonicalize, program_sizes
from dflop_jax.train import plan_timer, run_context, run_dir
from dflop_jax.train.choose_plan import describe_data
from dflop_jax.train.plan_timer import load_count_program
from dflop_jax.train.run_context import RunContext, with_step_count
from dflop_jax.train.run_dir import is_restarted_run, resolve_run_dir
from dflop_jax.train.trainer import broadcast_errors

from ..runtime import plain
from ..small import Small

PATTERN = "runs[1]/a-{time}"  # what glob would take for letters


@pytest.fixture
def settle(monkeypatch, tmp_path):
    """Names of folders at a time, which does not pass."""
    monkeypatch.chdir(tmp_path)

    def at(time, resume=False, pattern=PATTERN):
        monkeypatch.setattr(run_dir.time, "strftime", lambda how: time)
        return resolve_run_dir(pattern, ProcessGroup(), resume=resume)

    return at


def test_no_run_meets_another_one(settle):
    assert settle("1", pattern="mine") == "mine"
    assert settle("1") == "runs[1]/a-1"
    RunFolder("runs[1]/a-1").close()
    assert [settle("1"), settle("2")] == ["runs[1]/a-1-2", "runs[1]/a-2"]


def test_resuming_finds_the_newest(settle):
    assert settle("1", resume=True) == "runs[1]/a-1"
    for name in ("a-1", "a-3", "b-4"):
        RunFolder(f"runs[1]/{name}").close()
    assert settle("5", resume=True) == "runs[1]/a-3"
    assert settle("5") == "runs[1]/a-5"


def test_a_restart_goes_on_in_the_folder_of_its_launch(settle, monkeypatch):
    RunFolder("runs[1]/a-1", launch="mine").close()
    RunFolder("runs[1]/a-2", launch="another").close()
    monkeypatch.setenv(LAUNCH_ENV, "mine")
    assert settle("3") == "runs[1]/a-3"
    monkeypatch.setenv(RESTARTS_ENV, "1")
    assert settle("3") == "runs[1]/a-1"
    monkeypatch.setenv(LAUNCH_ENV, "a third")
    assert settle("3") == "runs[1]/a-3"


class Rows(list):
    """So many samples."""

    name = "rows"


@pytest.mark.parametrize(
    "epochs, n, steps, batch",
    [(1, 64, 8, 8), (1, 65, 9, 8), (0.5, 64, 4, 8), (3, 1, 3, 1), (0, 6, 7, 6), (1e-6, 9, 1, 8)],
)
def test_epochs_say_the_steps(epochs, n, steps, batch):
    config = Config(train=TrainConfig(steps=7, epochs=epochs, global_batch=8))
    model = SimpleNamespace()
    train = with_step_count(RunContext(config, model, [], ProcessGroup()), n).config.train
    assert (train.steps, train.epochs, train.global_batch) == (steps, 0, batch)
    said = describe_data(Rows(range(n)), train, 8)
    assert said.startswith(f"data: rows: {n} samples; {steps} steps of {batch} samples")
    assert ("(train.global_batch 8 is lowered, there are no more)" in said) == (n < 8)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_warm_up_that_was_set_is_no_longer_than_the_epochs(ratio):
    train = TrainConfig(epochs=1, global_batch=8, warmup_steps=9, warmup_ratio=ratio)
    place = RunContext(Config(train=train), SimpleNamespace(), [], ProcessGroup())
    if ratio:
        assert with_step_count(place, 64).config.train.steps == 8
        return
    with pytest.raises(ValueError, match="warmup_steps=9 is longer than the run of 8 steps"):
        with_step_count(place, 64)


def test_only_what_the_launch_has_begun_is_resumed(monkeypatch, tmp_path):
    def start(name: str, restarts: int) -> None:
        monkeypatch.setenv(LAUNCH_ENV, name)
        monkeypatch.setenv(RESTARTS_ENV, str(restarts))

    ours, old = tmp_path / "ours", tmp_path / "old"
    with RunFolder(old):
        pass
    start("a", 0)
    with RunFolder(ours, existing="overwrite", launch="a"):
        pass
    assert not is_restarted_run(ours)  # the first start obeys
    start("a", 1)
    assert is_restarted_run(ours)
    assert not is_restarted_run(old)  # of an older run, which the script has not come to
    start("b", 0)  # another launch, as after a requeue
    with RunFolder(ours, existing="resume", launch="b"):
        pass
    assert not is_restarted_run(ours)
    start("b", 1)
    assert is_restarted_run(ours)


@pytest.mark.parametrize(
    "error, says", [(jax.errors.JaxRuntimeError("gloo:\nclosed"), "gloo: closed"), (KeyError(), "")]
)
def test_an_error_that_a_loss_may_have_caused_leaves_time_for_the_loss(error, says):
    done: list[str | tuple] = []
    peers = SimpleNamespace(
        process_index=1,
        wait_for_peer_loss=lambda: done.append("notice"),
        fail=lambda *told: done.append(told),
    )
    with pytest.raises(type(error)), broadcast_errors(peers):
        raise error
    line = f"process 1 stopped: {says or 'KeyError'}"
    assert done == ["notice"] * bool(says) + [(line, 1)]


FOLDER = "jax_compilation_cache_dir"


@pytest.mark.parametrize("told", [None, "/told/to/jax"])
def test_programs_are_kept_where_jax_was_told_to_or_with_the_run(tmp_path, monkeypatch, told):
    monkeypatch.setattr(run_context, "_USER_CACHE_DIR", told)
    monkeypatch.setattr(run_context.compiler, "_cache_write", run_context.compiler._cache_write)
    before = jax.config.values[FOLDER]
    try:
        run_context.use_cache(tmp_path)
        assert jax.config.values[FOLDER] == (told or str(tmp_path / "xla"))
    finally:
        jax.config.update(FOLDER, before)


def test_every_process_keeps_its_programs(monkeypatch):
    kept = []
    monkeypatch.setattr(
        run_context.compilation_cache, "put_executable_and_time", lambda *a: kept.append(a)
    )
    run_context._cache_write("key", 2.5, "name", "backend", "executable")
    assert kept == [("key", "name", "executable", "backend", 2)]


def test_the_count_program_is_written_once_and_again_where_it_is_damaged(tmp_path, monkeypatch):
    written: list[ProgramSizes] = []
    monkeypatch.setattr(
        plan_timer, "canonicalize", lambda wanted: written.append(wanted) or canonicalize(wanted)
    )
    plan = plain.plan_of(Small(), (0, 1, 1, 1), (1, 1, 1, 1))
    scheduling = plan.scheduling
    plan = replace(plan, scheduling=replace(scheduling, grouping="balanced"))
    expected = canonicalize(program_sizes(plan.layout))
    assert load_count_program(plan, tmp_path) == expected
    assert load_count_program(plan, tmp_path) == expected
    assert written == [program_sizes(plan.layout)]
    (file,) = tmp_path.glob("counts-*.json")
    file.write_bytes(file.read_bytes()[:-20])
    assert load_count_program(plan, tmp_path) == expected
    assert len(written) == 2
    plan = replace(plan, scheduling=replace(scheduling, grouping="arrival"))
    assert load_count_program(plan, tmp_path) is None
    assert len(written) == 2
