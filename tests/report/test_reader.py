"""A run folder that is read while it is written: in any pieces it comes to what a whole reading
gives, also after a resume, and what is held of it is bounded."""

import json
import random
import tracemalloc

import pytest

from dflop_jax.report.charts import drawing
from dflop_jax.report.columns import MEDIAN_STEPS
from dflop_jax.report.reader import RunReader, read_run
from dflop_jax.report.run_folder import METRICS, RunFolder
from dflop_jax.report.spent import EVENTS, EventRow
from dflop_jax.report.tail import Tail
from tests.report.runs import make_plan, make_row


def same(reader, folder):
    """Whether what was read is what a reading of all gives."""
    whole = read_run("run", folder)
    assert drawing([reader]) == drawing([whole])
    assert repr(reader.summary(reader.plan())) == repr(whole.summary(whole.plan()))
    return reader.rows.n_steps


def write_steps(run, steps, begun_s=None):
    for i in steps:
        phases = {"forward": 0.1 * i, "idle": 0.01}
        run.append(make_row(i, phase_s=phases, n_bad=i % 2, imbalance={"llm": 0.1}, own={"x": i}))
        run.rows[EVENTS].append(EventRow(2.0 * i + 1, {"training": 2.0}, i, begun_s))
        begun_s = None


@pytest.mark.parametrize("seed", range(5))
def test_any_pieces_come_to_the_whole(tmp_path, seed):
    with RunFolder(tmp_path / "whole") as run:
        run.write_plan(make_plan())
        write_steps(run, range(40), begun_s=0.0)
    text = (tmp_path / "whole" / METRICS).read_bytes()
    cuts = sorted(random.Random(seed).sample(range(len(text)), 12))
    target = tmp_path / "run"
    target.mkdir()
    for name in ("plan.json", EVENTS):
        (target / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    reader = RunReader("run", target)
    assert reader.look()  # the events
    for start, stop in zip([0, *cuts], [*cuts, len(text)]):
        with (target / METRICS).open("ab") as file:
            file.write(text[start:stop])
        reader.look()
        assert reader.rows.n_steps == text[:stop].count(b"\n")  # half a row waits
    assert reader.notes == []
    assert not reader.look()
    assert same(reader, target) == 40


def test_a_resume_takes_rows_back(tmp_path):
    folder = tmp_path / "run"
    with RunFolder(folder) as run:
        run.write_plan(make_plan())
        write_steps(run, range(20), begun_s=0.0)
        reader = RunReader("run", folder)
        reader.look()
    with RunFolder(folder, existing="resume") as run:
        run.restart(12)
        write_steps(run, range(12, 15), begun_s=100.0)
        assert reader.look()
        assert same(reader, folder) == 15
        write_steps(run, range(15, 19))
    # Cut and longer again before anybody looked.
    with RunFolder(folder, existing="resume") as run:
        run.restart(5)
        for i in range(5, 60):
            run.append(make_row(i, loss=100.0))
    assert reader.look()
    assert same(reader, folder) == 60
    with RunFolder(folder, existing="overwrite") as run:
        assert reader.look()
        assert reader.rows.n_steps == 0
        write_steps(run, range(2), begun_s=0.0)
        reader.look()
        assert same(reader, folder) == 2


def test_a_run_is_read_from_before_its_first_row(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    reader = RunReader("run", folder)
    assert not reader.look()
    assert (reader.plan(), reader.summary(None), reader.n_planned()) == (None, None, 0)
    assert drawing([reader])["charts"] == []
    (folder / "config.json").write_text('{"train": {"steps": 7}}')
    assert reader.n_planned() == 7
    (folder / "config.json").write_text('{"train": {')  # half of it is there
    assert reader.n_planned() == 0


def test_a_broken_row_is_noted_and_left_out(tmp_path):
    folder = tmp_path / "run"
    with RunFolder(folder) as run:
        run.write_plan(make_plan())
        write_steps(run, range(2), begun_s=0.0)
    with (folder / METRICS).open("a") as file:
        file.write('{"step": "x"}\n' + json.dumps({"step": 3, "step_s": 1.0}) + "\n")
    reader = RunReader("run", folder)
    reader.look()
    assert reader.rows.n_steps == 3
    (note,) = reader.notes
    assert f"{METRICS}:3" in note
    with pytest.raises(ValueError, match=f"{METRICS}:3"):
        read_run("run", folder)


def test_looking_ends_when_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr("dflop_jax.report.reader._LOOK_BYTES", 5000)
    folder = tmp_path / "run"
    with RunFolder(folder) as run:
        run.write_plan(make_plan())
        write_steps(run, range(50), begun_s=0.0)
    reader, looks = RunReader("run", folder), 0
    while reader.look(lambda: False) and reader.left_bytes:
        looks += 1
        assert 0 < reader.rows.n_steps < 50
    assert looks > 3
    assert same(reader, folder) == 50


@pytest.mark.slow
def test_what_is_held_does_not_grow_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("dflop_jax.report.columns.MEDIAN_STEPS", 500)
    assert MEDIAN_STEPS > 500
    folder = tmp_path / "run"
    folder.mkdir()
    line = json.dumps({"step": 0, "step_s": 0.5, "loss": 1.0, "phase_s": {"forward": 0.4}}) + "\n"
    held = []
    tracemalloc.start()
    reader = RunReader("run", folder)
    for rows in (10_000, 20_000):
        with (folder / METRICS).open("a") as file:
            file.write(line * rows)
        reader.look()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert reader.rows.n_steps == 30_000
    assert held[1] < 1.2 * held[0] + 200_000


def test_the_tail_of_no_file_of_an_empty_one_and_of_a_shorter_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.read(100).lines == ()
    path.write_bytes(b"")
    assert (tail.read(100).lines, tail.read(100).anew) == ((), False)
    path.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert tail.read(100).lines == (b'{"step": 0}',)
    assert Tail(path).read(100, closed=True).lines == (b'{"step": 0}', b'{"step": 1}')
    path.write_bytes(b'{"step"')
    added = tail.read(100)
    assert (added.lines, added.anew) == ((), True)
    path.unlink()
    assert tail.read(100).anew is False  # nothing of it counted
