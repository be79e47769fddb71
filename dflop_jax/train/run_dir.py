"""The folder of a run: its name, which may contain its start time, and its settings."""

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
    """Replace "{time}" in `pattern` by the time, the same on all processes. A run that is resumed
    or restarted keeps its name: the newest that matches the pattern (and is of this launch)."""
    if TIME_PLACEHOLDER not in pattern:
        return pattern
    name = _make_name(pattern, resume) if peers.is_primary else ""
    return peers.broadcast("run_dir", name, str)


def _make_name(pattern: str, resume: bool) -> str:
    restart = is_restart()
    is_match = is_restarted_run if restart else holds_run
    if restart or resume:
        folders = sorted(glob.glob("*".join(map(glob.escape, pattern.split(TIME_PLACEHOLDER)))))
        if matching := [f for f in folders if is_match(f)]:
            return matching[-1]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name, n = pattern.replace(TIME_PLACEHOLDER, stamp), 1
    while Path(name).exists():  # another run started in the same second
        n += 1
        name = pattern.replace(TIME_PLACEHOLDER, f"{stamp}-{n}")
    return name


def read_run_config(folder: str | Path) -> Config:
    """Read the configuration of a run; ValueError if there is none."""
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise ValueError(f"{folder}: no {CONFIG} in it; give a run folder or an experiment file")
    try:
        sections = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(sections, Config)
    except (OSError, msgspec.DecodeError) as e:
        raise ValueError(f"{file}: not a configuration ({e}); give the experiment file") from None
    if not {"model", "data", "train"} <= sections.keys():
        raise ValueError(f"{file}: not the configuration of a run; give a run folder")
    return config


def is_restarted_run(folder: str | Path) -> bool:
    """Return whether this process's launch has already started the run in this folder. A script may
    train in several folders, some of which may hold older runs."""
    return is_restart() and read_launch_name(folder) == launch_name()
