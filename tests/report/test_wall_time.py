"""Where the seconds of a run go: against clocks that are set by hand."""

import random

import pytest

from dflop_jax.report import wall_time
from dflop_jax.report.row_file import RowFile
from dflop_jax.report.wall_time import DATA, EVENTS, PLAN, START, TRAINING, TimeLog, read_wall_time
from tests.report.runs import cells_of


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s=1_000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s

    def passes(self, seconds):
        self.now_s += seconds


@pytest.fixture
def begin(tmp_path):
    """Function that begins a process of a run in `tmp_path` on a clock, as a trainer does."""

    def run(clock, resumed):
        log = TimeLog(clock)
        clock.passes(3.0)
        log.switch_to(START)
        clock.passes(1.0)
        with log.track(PLAN):
            clock.passes(5.0)
        files.append(RowFile(tmp_path / EVENTS))
        log.write_to(files[-1])
        log.resumed(resumed)
        log.switch_to(TRAINING)
        return log

    files = []
    yield run
    for file in files:
        file.close()


def test_a_run_that_was_killed_lost_the_steps_that_are_run_again(begin, tmp_path):
    clock = Clock()
    log = begin(clock, 0)
    for step in range(5):
        clock.passes(2.0 + step)
        log.step(step, {DATA: 0.5})
    clock.passes(0.7)  # then it is killed
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"until_s": 10')  # in the middle of a row
    clock.passes(9.0)
    log = begin(clock, 3)
    clock.passes(4.0)
    log.step(3, {})
    log.finish_writing()
    spent = read_wall_time(tmp_path)
    assert spent.starts == 2
    trained = {0: 1.5, 1: 2.5, 2: 3.5, 3: 4.0}
    lost = {wall_time.LOST: 4.5 + 5.5, wall_time.STOPPED: 9.7}
    want = {TRAINING: sum(trained.values()), DATA: 2.5, START: 8.0, PLAN: 10.0} | lost
    assert spent.seconds == pytest.approx(want)
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s) == clock() - 1_000.0
    assert spent.goodput == pytest.approx(sum(trained.values()) / spent.wall_s)


@pytest.mark.parametrize("seed", range(4))
def test_seconds_add_up_to_the_clock_whatever_happens(begin, tmp_path, seed):
    rng, clock, done = random.Random(seed), Clock(), 0
    for _ in range(rng.randint(1, 6)):
        done = rng.randint(0, done)
        log = begin(clock, done)
        for _ in range(rng.randint(0, 8)):
            clock.passes(rng.choice([0.0, 1.0, 3.0]))
            log.step(done, {DATA: rng.choice([0.0, 0.5, 9.0])})
            done += 1
        log.finish_writing()
        ended_s = clock()
        clock.passes(rng.uniform(0, 50))
    spent = read_wall_time(tmp_path)
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s) == ended_s - 1_000.0
    assert all(s >= 0 for s in spent.seconds.values())
    assert spent.seconds.keys() <= set(wall_time.CATEGORIES)


def test_a_clock_that_is_set_back_takes_nothing_away(tmp_path):
    clock = Clock()
    log = TimeLog(clock)
    rows = RowFile(tmp_path / EVENTS)
    log.write_to(rows)
    clock.passes(-100.0)
    log.switch_to(START)
    log.finish_writing()
    rows.close()
    assert read_wall_time(tmp_path).wall_s == 0.0 == read_wall_time(tmp_path).goodput


def test_without_events_nothing_is_told_and_a_broken_row_is_named(make_run, tmp_path):
    run = make_run()
    assert read_wall_time(run) is None
    assert "wall time" not in cells_of(run)
    (run / EVENTS).write_text('{"step": 3}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl:1: not a row of events.*remove"):
        cells_of(run)


def test_figures(begin, make_run, tmp_path):
    clock = Clock()
    log = begin(clock, 0)
    clock.passes(11.0)
    log.step(0, {})
    log.finish_writing()
    run = make_run("with")
    (tmp_path / EVENTS).rename(run / EVENTS)
    cells = cells_of(run)
    assert (cells["wall time"], cells["starts"]) == ("20 s", "1")
    assert cells["goodput: time of steps that count"] == "55.0%"
    assert cells["time of plan"] == "25.0%"
    assert "time of evaluation" not in cells
