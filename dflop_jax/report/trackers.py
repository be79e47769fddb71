"""Trackers, which send the numbers of metrics.jsonl to TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.config import Config
from dflop_jax.report.metrics import TRACKED_FIELDS, StepMetrics, iter_numbers

TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id"
_OPTIONS = {"wandb_project": "wandb", "tensorboard": "tensorboardX"}  # option -> package


def step_scalars(row: StepMetrics) -> dict[str, float]:
    """Return the tracked numbers of a step, by field or "field/key"."""
    numbers = iter_numbers(row, TRACKED_FIELDS)
    return {name if isinstance(name, str) else "/".join(name): v for name, v in numbers}


def evaluation_scalars(row: Any) -> dict[str, float]:
    """Return the tracked numbers of an evaluation (of `train.evaluate`), by name."""
    scalars = {}
    for name, losses in {"": row, **row.by_source}.items():
        prefix = f"held_out/{name}/" if name else "held_out/"
        scalars[f"{prefix}loss"] = losses.loss
        if losses.accuracy is not None:
            scalars[f"{prefix}accuracy"] = losses.accuracy
    return scalars


def check_trackers(config: Config) -> list[Any]:
    """Return the packages of `_OPTIONS`, None if not requested; ValueError: one is missing."""
    packages = []
    for option, name in _OPTIONS.items():
        try:
            is_needed = getattr(config.train, option)
            packages.append(importlib.import_module(name) if is_needed else None)
        except ImportError as e:
            raise ValueError(
                f"train.{option} needs {name}, which cannot be imported ({e}): pip install {name}"
            ) from None
    return packages


def open_trackers(config: Config, folder: Path, start: int) -> list[Tracker]:
    """Return the configured trackers of a run folder, which continue at step `start`."""
    wandb, tensorboard = check_trackers(config)
    trackers: list[Tracker] = [WeightsAndBiases(wandb, config, folder)] if wandb else []
    if tensorboard:
        trackers.append(TensorBoard(tensorboard, folder / TENSORBOARD, start))
    return trackers


class TensorBoard:
    """Writes an event file in a folder. Its session start at step `start` makes TensorBoard drop
    this and later steps of earlier files."""

    def __init__(self, package: Any, folder: Path, start: int) -> None:
        self._event = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        folder.mkdir(parents=True, exist_ok=True)
        n_files = len(list(folder.glob("*.tfevents.*")))  # read in the order of their names
        self._file = package.RecordWriter(str(folder / f"events.out.tfevents.{n_files:06d}"))
        self._write(file_version="brain.Event:2")
        session_start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(step=start, session_log=session_start)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a step; it is on disk when this returns."""
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in scalars.items()]
        self._write(step=step, summary=self._summary(value=values))
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        self._file.close()

    def _write(self, **fields: Any) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())


class WeightsAndBiases:
    """Writes to a W&B run whose id is in the run folder; W&B ignores repeated steps."""

    def __init__(self, package: Any, config: Config, folder: Path) -> None:
        train, file = config.train, folder / WANDB_ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            self._run = package.init(
                project=train.wandb_project,
                entity=train.wandb_entity or None,
                name=train.wandb_name or folder.name,
                tags=train.wandb_tags or None,
                id=file.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(folder),
                config=msgspec.to_builtins(config),
            )
        except Exception as e:  # wandb's own errors of login and network
            raise ValueError(
                f"train.wandb_project={train.wandb_project}: W&B does not start ({e}); run wandb "
                "login, or set WANDB_MODE=offline"
            ) from None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | WeightsAndBiases
