"""The run folder: the names of its files, and functions that write and read them."""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from dflop_jax import folders
from dflop_jax.records import Plan, Profile, Trace
from dflop_jax.records.files import load, save
from dflop_jax.report import trackers
from dflop_jax.report.metrics import MetricsRow, StepMetrics
from dflop_jax.report.row_file import RowFile, complete_lines, read_header, read_rows
from dflop_jax.report.trace import write_trace
from dflop_jax.report.trackers import TENSORBOARD, WANDB_ID
from dflop_jax.report.wall_time import EVENTS

CONFIG, PROFILE, PLAN = "config.json", "profile.json", "plan.json"
METRICS, EVALUATIONS, TRACE = "metrics.jsonl", "evaluations.jsonl", "trace.json"
TIMELINE, LOSS, SUMMARY = "timeline.png", "loss.png", "summary.md"
CORRECTIONS = "corrections.jsonl"
CHECKPOINTS, XPROF = "checkpoints", "xprof"
HUNG = "hung"  # a folder with the stacks of every process of a run that hung
_LAUNCH = "launch"  # a file with the name of the launch that started the run, if any
_LOCK = "lock"
_OTHER_RUN_DIR = "choose another --run_dir"
# Errors of a file system without flock.
_NO_LOCK_ERRNOS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
# Output files of report and simulate.
PAGE, PICTURE = "report.html", "report.png"
SIMULATED, SIMULATED_PICTURE = "simulated.json", "simulated.png"
_ROW_FILES = (METRICS, EVALUATIONS, CORRECTIONS, EVENTS)
_REPORT_FILES = (TIMELINE, LOSS, SUMMARY, PAGE, PICTURE, WANDB_ID)
_OUTPUTS = (*_ROW_FILES, _LAUNCH, TRACE, *_REPORT_FILES)
# A run folder has one of these files; other programs also write files like config.json.
_RUN_MARKERS = (METRICS, PROFILE, PLAN, _LOCK, SIMULATED, f"{CHECKPOINTS}/*/COMMITTED")
_LOG_SUFFIXES = {".log", ".out", ".err"}  # files that a shell or Slurm may write before the run
_RECORDS = {CONFIG, PROFILE, PLAN, _LOCK, *_OUTPUTS} - {PAGE, PICTURE}
log = logging.getLogger("dflop_jax")


class FolderInUse(ValueError):
    """Raised if another run is writing to the folder; a retry may succeed when it has ended."""


class RunFolder:
    """Writes the files of one run; only process 0 has one. On exit from its context, a folder that
    it created is removed if it has no step and no checkpoint, except under a launch.

    Args:
      existing: how to treat an earlier run in the folder: "error", "overwrite" (its outputs and
        checkpoints are removed) or "resume" (they stay; call `restart`).
      launch: the name of the launch that the run belongs to; "" for none.

    Raises:
      FolderInUse: another run is writing to the folder.
      ValueError: the folder has metrics and `existing` is "error", it cannot be written, or it is
        not a run folder (see `check_run_dir`).
      OSError: the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        existing: Literal["error", "overwrite", "resume"] = "error",
        launch: str = "",
    ) -> None:
        self.path = Path(path)
        self.trackers: Sequence[trackers.Tracker] = ()
        self.tracking_interval = 1  # trackers get every n-th step
        self.rows = {name: RowFile(self.path / name) for name in _ROW_FILES}
        check_run_dir(self.path)
        self._created_folders = [] if launch else folders.missing_folders(self.path)
        with folders.writable_path(
            folders.make_folder(self.path, _OTHER_RUN_DIR) / _LOCK, _OTHER_RUN_DIR
        ) as lock:
            self._lock = lock.open("ab")
        try:
            self._open(existing)
            if launch:  # last, since a folder with this file is resumed
                (self.path / _LAUNCH).write_text(launch)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, existing: str) -> None:
        try:
            # The operating system releases the lock when the process ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = f"wait for it, or {_OTHER_RUN_DIR}"
            raise FolderInUse(f"{self.path}: another run is writing to it; {remedy}") from None
        except OSError as e:
            if e.errno not in _NO_LOCK_ERRNOS:
                reason = f"cannot be locked ({e.strerror}); {_OTHER_RUN_DIR}"
                raise ValueError(f"{self.path}: {reason}") from None
            _warn_unlocked(self.path, e.strerror or str(e))
        metrics = self.path / METRICS
        metrics.touch()
        content = "the metrics" if metrics.stat().st_size else "checkpoints"
        if existing == "error" and self._is_worth_keeping((CHECKPOINTS,)):
            raise ValueError(
                f"{self.path}: holds {content} of another run; choose another --run_dir, resume "
                "that run (--resume auto) or replace it (--overwrite)"
            )
        if existing == "overwrite":
            for name in _OUTPUTS:
                (self.path / name).unlink(missing_ok=True)
            for name in (CHECKPOINTS, TENSORBOARD, XPROF, HUNG):
                shutil.rmtree(self.path / name, ignore_errors=True)
            metrics.touch()

    def restart(self, start_step: int) -> None:
        """Drop the rows of `start_step` and later steps, and incomplete rows."""
        self.rows[METRICS].drop_except(lambda row: row.step < start_step)
        # The step of an evaluation is the number of steps before it.
        self.rows[EVALUATIONS].drop_except(lambda row: row.step <= start_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._created_folders and not self._is_worth_keeping():
            shutil.rmtree(self.path, ignore_errors=True)
            folders.remove_empty_folders(self._created_folders[1:])

    def close(self) -> None:
        try:
            for rows in self.rows.values():
                rows.close()
            for tracker in self.trackers:
                tracker.close()
        finally:
            self._lock.close()

    def _is_worth_keeping(self, folders: Sequence[str] = (CHECKPOINTS, HUNG)) -> bool:
        has_rows = (self.path / METRICS).stat().st_size > 0
        return has_rows or any(any(self.path.glob(f"{name}/*")) for name in folders)

    def write_config(self, config: Any) -> None:
        text = msgspec.json.format(msgspec.json.encode(config), indent=1)
        (self.path / CONFIG).write_bytes(text)

    def write_profile(self, profile: Profile) -> None:
        save(profile, self.path / PROFILE)

    def write_plan(self, plan: Plan) -> None:
        save(plan, self.path / PLAN)

    def append(self, row: StepMetrics) -> None:
        """Add one row to metrics.jsonl and to the trackers."""
        self.rows[METRICS].append(row)
        if (row.step + 1) % self.tracking_interval == 0:
            self._track(row.step, trackers.step_scalars(row))

    def append_evaluation(self, row: Any) -> None:
        """Add one row to evaluations.jsonl, or replace the row of the same step; trackers get a
        step once."""
        rows = self.rows[EVALUATIONS]
        headers = [read_header(line) for line in complete_lines(rows.path)]
        is_repeated = any(header is not None and header.step >= row.step for header in headers)
        if is_repeated:
            rows.drop_except(lambda old: old.step != row.step)
        rows.append(row)
        if not is_repeated:
            self._track(row.step - 1, trackers.evaluation_scalars(row))

    def _track(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send scalars to the trackers; stop using a tracker whose disk is full."""
        for tracker in self.trackers:
            try:
                tracker.log(step, scalars)
            except OSError as e:
                if e.errno not in folders.DISK_FULL_ERRNOS:
                    raise
                self.trackers = [t for t in self.trackers if t is not tracker]
                text = "step %d: %s cannot write (%s) and is off for this run; %s has all steps"
                log.warning(text, step, type(tracker).__name__, e.strerror, METRICS)

    def write_trace(self, traces: Sequence[Trace], labels: Mapping[int, str] | None = None) -> None:
        """Write trace.json, if the disk has room; `labels` are the labels of the traced groups."""
        with folders.tolerate_full_disk(self.path / TRACE):
            write_trace(self.path / TRACE, traces, labels)


@cache  # once for a folder
def _warn_unlocked(path: Path, reason: str) -> None:
    text = "the file system has no locks (%s), so a second run in this folder is not prevented"
    log.warning(f"%s: {text}: start none there while this one runs", path, reason)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl; ValueError: it is missing, empty or broken."""
    path = metrics_file(folder)
    if not [*metrics_rows(path)]:
        raise no_step_error(path)
    return [msgspec.json.decode(line) for line in complete_lines(path)]


def metrics_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a metrics.jsonl as `MetricsRow`."""
    return read_rows(path, MetricsRow, "a row of metrics")


def metrics_file(folder: str | Path) -> Path:
    """Return the metrics.jsonl of a folder (or the file itself); ValueError if there is none."""
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"{path}: no such run folder; check the path, or train it first")
    if path.is_dir():
        path = path / METRICS
    if not path.exists():
        raise ValueError(f"{path}: no such file; {path.parent} is not a run folder, train it first")
    return path


def no_step_error(path: Path) -> ValueError:
    return ValueError(f"{path}: has no step yet; let the run finish a step, or train it again")


class EvaluationRow(msgspec.Struct):
    """The fields of a row of evaluations.jsonl (written by `train.evaluate`) that reports read."""

    step: int
    loss: float | None
    accuracy: float | None
    by_source: dict[str, dict[str, float | None]] = {}


def read_evaluations(folder: str | Path) -> list[EvaluationRow]:
    """Return the complete rows of a run's evaluations.jsonl; [] if there is no such file."""
    return [*read_rows(Path(folder) / EVALUATIONS, EvaluationRow, "a row of evaluations")]


def holds_run(folder: str | Path) -> bool:
    """Return whether a folder has files of a run, also of another version of dflop_jax."""
    names = (_LOCK, CONFIG, METRICS, TRACE, CHECKPOINTS)
    return any((Path(folder) / name).exists() for name in names)


def check_run_dir(folder: str | Path) -> None:
    """Raise ValueError if a folder is neither empty nor a run folder."""
    path = Path(folder)
    if not path.is_dir() or any(any(path.glob(mark)) for mark in _RUN_MARKERS):
        return
    for file in path.iterdir():
        is_empty = file.name.startswith(".") or file.name == "lost+found"  # ignored files
        if not is_empty and file.suffix not in _LOG_SUFFIXES:
            raise ValueError(
                f"{path}: holds {file.name} and no run; choose a new or empty folder as --run_dir"
            )


def answer_folder(
    run_dir: str | Path, answer_name: str, out: str | None = None, *, is_kept: bool = True
) -> Path:
    """Create and return the folder for a command's output: `out`, else `run_dir`, or
    `run_dir`/`answer_name` if `run_dir` has a run. ValueError: it is a file, has a run, or cannot
    be written. Unless `is_kept`, the folder is removed again (a check)."""
    remedy = "choose another --out" if out else "choose another --run_dir, or give --out"
    folder = Path(out or run_dir)
    if not out:
        check_run_dir(folder)
    if not out and holds_run(folder):
        folder /= answer_name
    if holds_run(folder):
        raise ValueError(f"{folder}: holds a run, whose records stay; {remedy}")
    created_folders = folders.missing_folders(folder)
    folders.make_folder(folder, remedy)
    if not is_kept:
        folders.remove_empty_folders(created_folders)
    return folder


def check_answer_file(file: str | Path) -> None:
    """Raise ValueError if a command's output file is a folder or a file of a run."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file in it")
    if path.name in _RECORDS and holds_run(path.parent):
        raise ValueError(f"{path}: is a record of a run, which stays; choose another --out")


def read_launch_name(folder: str | Path) -> str:
    """Return the name of the launch that started the run in a folder; "" for none."""
    file = Path(folder) / _LAUNCH
    return file.read_text() if file.exists() else ""


def read_plan(folder: str | Path) -> Plan:
    """Return the plan of a run; ValueError names the file if it is missing or broken."""
    return load(Plan, Path(folder) / PLAN)
