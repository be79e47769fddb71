"""The folder of a run: its name, which may have the time at which it began, and its settings."""

from __future__ import annotations

import glob
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dflop_jax.config import Config
from dflop_jax.distributed.processes import is_restart, launch_name
from dflop_jax.report.run_folder import CONFIG, holds_run, read_launch_name

if TYPE_CHECKING:
    from dflop_jax.distributed.messages import ProcessGroup

TIME_PLACEHOLDER = "{time}"


def resolve_run_dir(pattern: str, peers: ProcessGroup, *, resume: bool) -> str:
    """`pattern` with the time in the place of "{time}", the same on all processes.

    A run that is resumed, or that its launch has started again, keeps the name that it has: of all
    that fit the pattern, the newest that has begun (of this launch).
    """
    if TIME_PLACEHOLDER not in pattern:
        return pattern
    name = _make_name(pattern, resume) if peers.is_primary else ""
    return peers.broadcast("run_dir", name, str)


def _make_name(pattern: str, resume: bool) -> str:
    restart = is_restart()
    if restart or resume:
        folders = sorted(glob.glob("*".join(map(glob.escape, pattern.split(TIME_PLACEHOLDER)))))
        matching = [f for f in folders if holds_run(f) and (not restart or belongs_to_launch(f))]
        if matching:
            return matching[-1]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name, n = pattern.replace(TIME_PLACEHOLDER, stamp), 1
    while Path(name).exists():  # begun in the same second
        n += 1
        name = pattern.replace(TIME_PLACEHOLDER, f"{stamp}-{n}")
    return name


def read_run_config(folder: str | Path) -> Config:
    """The configuration that a run's folder keeps; ValueError where there is none."""
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise ValueError(f"{folder}: no {CONFIG} in it; give a run folder or an experiment file")
    try:
        sections = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(sections, Config)
    except (OSError, msgspec.DecodeError) as e:
        raise ValueError(f"{file}: not a configuration ({e}); give the experiment file") from None
    if not {"model", "data", "train"} <= sections.keys():
        raise ValueError(f"{file}: is not that of a run; give a run folder, which training wrote")
    return config


def belongs_to_launch(folder: str | Path) -> bool:
    """Whether the launch that this process belongs to has begun the run in a folder."""
    return read_launch_name(folder) == launch_name()
