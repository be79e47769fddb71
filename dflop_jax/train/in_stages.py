"""A run of several stages (the connector, then all): each is a run in a folder of its own, planned
for what trains in it, and begins with the parameters that the stage before ended with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflop_jax.cluster.told import is_restart
from dflop_jax.config import Config
from dflop_jax.report.run_folder import FINISHED, check_own, has_begun
from dflop_jax.train.callbacks import Callback
from dflop_jax.train.results import FitResult
from dflop_jax.train.run_dir import is_of_launch
from dflop_jax.train.stage_folders import stage_folders
from dflop_jax.train.trainer import Trainer


class Finished(msgspec.Struct, frozen=True):
    """That a stage is over: after how many steps, and why a callback ended it ("": none did)."""

    steps: int
    stopped_by: str = ""


def fit_stages(
    stages: Mapping[str, Config],
    *,
    existing: Literal["error", "overwrite", "resume"] = "error",
    callbacks: Sequence[Callback] = (),
    dry: bool = False,
    tell: Callable[[str, bool], None] = lambda line, ready: None,
    make: Callable[..., Trainer] = Trainer,
) -> dict[str, FitResult]:
    """Train one stage after another.

    A stage that is resumed goes on where it was; those before it are over and are not run again.

    Args:
      stages: a configuration by name, in order, all with the same `run_dir`, in which each has the
        folder `stage_folders` says. From the second one on, `model.weights` is the stage before.
      existing, callbacks, dry, tell: as for `Trainer`; callbacks are told of every stage.
      make: makes a stage's Trainer.

    Returns:
      How each stage ended that this call ran; the last one may have been preempted.

    Raises:
      ValueError: as `Trainer` for any of the stages, before the first one trains; a stage saves
        nothing, or the folder holds another run.
    """
    configs = stage_folders(stages)
    for name, config in configs.items():
        if not config.checkpoint.saves:
            raise ValueError(
                f"stage {name}: checkpoint.every=0 saves nothing that it could be resumed from, or "
                "the next stage begin with; give it a number of steps"
            )
    began_s = time.monotonic()
    options: dict[str, Any] = {"existing": existing, "callbacks": callbacks, "dry": dry}
    # What any of them refuses is said before the first one takes its hours.
    first, *others = configs
    trainers = {first: make(configs[first], tell=tell, **options)}
    for name in others:
        unread = replace(configs[name].model, weights=())  # they are not there yet
        trainers[name] = make(replace(configs[name], model=unread), **options)
    if dry:
        return {name: trainer.fit() for name, trainer in trainers.items()}
    peers = trainers[first].peers
    settled = [trainer.config for trainer in trainers.values()]
    found = msgspec.json.encode(_over(settled, existing)) if peers.is_hub else None
    n_over, trouble = msgspec.json.decode(peers.share("stages", found), type=tuple[int, str])
    if trouble:
        raise ValueError(trouble)
    results: dict[str, FitResult] = {}
    for name, config in list(configs.items())[n_over:]:
        trainer = trainers.pop(name)
        wanted = _with_hours_left(config, time.monotonic() - began_s) if results else config
        if name != first:
            trainer = make(wanted, tell=tell, **options)
        if peers.is_hub:
            tell(f"stage {name}: {config.run_dir}", True)
        results[name] = result = trainer.fit()
        if result.preempted:
            break
        if peers.is_hub:
            _write(Path(config.run_dir, FINISHED), Finished(result.steps_done, result.stopped_by))
    return results


def _over(configs: Sequence[Config], existing: str) -> tuple[int, str]:
    """How many stages are over, as their folders tell, and why the others cannot be run in theirs;
    "" if they can."""
    try:
        folders = [Path(config.run_dir) for config in configs]
        check_own(folders[0].parent, [folder.name for folder in folders])
        over = [_is_over(config, existing) for config in configs]
    except ValueError as e:
        return 0, str(e)
    first = over.index(False) if False in over else len(over)
    for n, config in enumerate(configs[first:], first):
        folder = config.run_dir
        if existing == "overwrite" or not has_begun(folder):
            continue
        if not _goes_on(folder, existing):
            return (
                first,
                f"{folder}: holds another run; choose another run_dir, resume or overwrite it",
            )
        if n > first:
            before = configs[first].run_dir
            return first, (
                f"{folder}: has begun, but {before} is not over; choose another run_dir, or remove "
                "the later stage's folder"
            )
    return first, ""


def _goes_on(folder: str, existing: str) -> bool:
    """Whether a run that has begun in a folder is gone on with."""
    return existing == "resume" or (is_restart() and is_of_launch(folder))


def _is_over(config: Config, existing: str) -> bool:
    """Whether a stage need not be run, as its folder tells."""
    file = Path(config.run_dir, FINISHED)
    if not _goes_on(config.run_dir, existing) or not file.exists():
        return False
    try:
        finished = msgspec.json.decode(file.read_bytes(), type=Finished)
    except msgspec.DecodeError as e:
        raise ValueError(f"{file}: says not how the stage ended ({e}); remove it") from None
    return bool(finished.stopped_by) or finished.steps >= config.train.steps


def _with_hours_left(config: Config, spent_s: float) -> Config:
    """The configuration with `train.max_hours` less what the stages before took."""
    if not (hours := config.train.max_hours):
        return config
    left = max(hours - spent_s / 3600, 1e-6)
    return replace(config, train=replace(config.train, max_hours=left))


def _write(file: Path, finished: Finished) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(finished))
    part.rename(file)
