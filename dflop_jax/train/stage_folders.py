"""Where the stages of a run are, and what each begins with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dflop_jax.config import Config
from dflop_jax.train.run_dir import TIME

_NAME = re.compile(r"[\w-]+")


def stage_folders(stages: Mapping[str, Config]) -> dict[str, Config]:
    """The stages, each in the folder NUMBER-NAME of their `run_dir`, and each but the first one
    with the parameters of the one before.

    Raises:
      ValueError: no stage, a name that is none of a folder, or different `run_dir`s.
    """
    if not stages:
        raise ValueError("a run of stages has none; give a Config by name for each")
    folders = {config.run_dir for config in stages.values()}
    if len(folders) > 1:
        raise ValueError(
            f"stages of one run have the run_dirs {', '.join(sorted(folders))}; give all the same"
        )
    (folder,) = folders
    if TIME in folder:
        raise ValueError(f"run_dir={folder}: stages need a folder without {TIME}; name one")
    found: dict[str, Config] = {}
    before = ""
    for number, (name, config) in enumerate(stages.items(), 1):
        if not _NAME.fullmatch(name):
            raise ValueError(f"stage {name!r}: a name must have letters, digits, _ and - only")
        config = replace(config, run_dir=f"{folder}/{number}-{name}")
        if before:
            config = replace(config, model=replace(config.model, weights=(before,)))
        found[name], before = config, config.run_dir
    return found
