"""Rows that find a full disk, and files of rows that a kill cut short."""

import errno
import io
import json
import logging
import math
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from dflop_jax.report import row_file, run_folder
from dflop_jax.report.run_folder import RunFolder, read_metrics
from dflop_jax.report.trackers import step_scalars
from dflop_jax.train.callbacks import Evaluation
from tests.report.runs import cells_of, make_plan, make_row


@pytest.fixture
def disk(monkeypatch):
    """A disk with room for so many bytes more; what is written when it is full is cut."""
    disk = SimpleNamespace(room=math.inf, error=errno.ENOSPC)

    class File(io.FileIO):
        def write(self, data):
            n = min(len(data), disk.room)
            if data and not n:
                raise OSError(disk.error, "No space left on device")
            disk.room -= n
            return super().write(bytes(data)[:n])

    monkeypatch.setattr(row_file, "FileIO", File)
    return disk


def steps(path):
    return [row["step"] for row in read_metrics(path)]


@pytest.mark.parametrize("left", [0, 1, 300])
def test_rows_wait_for_room_and_are_written_in_order(tmp_path, disk, caplog, left):
    with RunFolder(tmp_path) as run, caplog.at_level(logging.WARNING):
        run.append(make_row(0))
        disk.room = left
        for step in (1, 2):
            run.append(make_row(step))
            run.append_evaluation(Evaluation(step, 1.0, 0.5))
            assert steps(tmp_path) == [0]  # a part of a row is not read
        disk.room = math.inf
        run.append(make_row(3))
        run.append_evaluation(Evaluation(3, 1.0, 0.5))
        assert steps(tmp_path) == [0, 1, 2, 3]
    evaluations = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [1, 2, 3]
    warned = [r.getMessage().split(": ", 1)[0] for r in caplog.records]
    assert warned == [f"{tmp_path}/metrics.jsonl", f"{tmp_path}/evaluations.jsonl"]
    assert "No space left on device; rows wait in memory" in caplog.records[0].getMessage()


def test_rows_that_a_full_disk_lost_show_after_a_resume(tmp_path, disk, caplog):
    with RunFolder(tmp_path) as run:
        run.write_plan(make_plan())
        run.append(make_row(0))
        disk.room = 100
        for step in (1, 2):
            run.append(make_row(step))
    assert "the disk is full, so its last rows are lost" in caplog.text
    disk.room = math.inf
    with RunFolder(tmp_path, existing="resume") as run:
        run.restart(3)
        run.append(make_row(3))
        disk.room, disk.error = 0, errno.EIO  # other errors end the run
        with pytest.raises(OSError, match="No space"):
            run.append(make_row(4))
    assert steps(tmp_path) == [0, 3]
    assert cells_of(tmp_path)["steps without a row"] == "2"


def test_a_trace_that_finds_no_room_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def cut(path, traces, labels):
        path.write_text("{")
        raise OSError(errors[-1], "No space left on device")

    monkeypatch.setattr(run_folder, "write_trace", cut)
    errors = [errno.ENOSPC]
    with RunFolder(tmp_path) as run:
        run.append(make_row(0))
        run.write_trace([])
        assert not (tmp_path / "trace.json").exists()
        errors.append(errno.EIO)
        with pytest.raises(OSError, match="No space"):
            run.write_trace([])
    assert "No space left on device; it is not written" in caplog.text


def test_a_tracker_on_a_full_disk_is_given_up(tmp_path, caplog):
    full, other = Mock(), Mock()
    full.log.side_effect = OSError(errno.ENOSPC, "No space left on device")
    with RunFolder(tmp_path) as run:
        run.trackers = [full, other]
        for step in range(3):
            run.append(make_row(step))
    assert full.log.call_count == 1
    assert other.log.mock_calls == [call(step, step_scalars(make_row(step))) for step in range(3)]
    assert sum("cannot write" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("end", ["", "\n", '\n{"step": 4, "l'])
def test_rows_that_go_are_cut_off_or_left_out(tmp_path, end):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"step": k, "x": "y"}) for k in (2, 0, 3, 1)) + end)
    rows = row_file.RowFile(file)
    assert rows.drop_except(lambda row: row.step < 2) == 2
    assert file.read_text() == '{"step": 0, "x": "y"}\n{"step": 1, "x": "y"}\n'
    assert rows.drop_except(lambda row: True) == 0
    assert rows.drop_except(lambda row: False) == 2
    assert file.read_bytes() == b""
