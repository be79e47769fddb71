"""Published folders that a run writes while it trains, each from a checkpoint of it.

Process 0 reads the checkpoint, which has the pieces of all processes, a matrix of a layer at a time
and writes the folder in a thread, so that nobody holds the whole model for it. Until it is whole it
has another name, and its checkpoint stays.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore
from dflop_jax.config import Config
from dflop_jax.config_texts import RATES, named_numbers
from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.layout import trained_groups
from dflop_jax.report.run_folder import CHECKPOINTS, EXPORTS
from dflop_jax.train.initial import first_weights, run_and_step
from dflop_jax.train.lazy_params import computed, saved_params
from dflop_jax.train.load_params import shapes_of
from dflop_jax.train.originals import with_originals
from dflop_jax.train.run_dir import run_config
from dflop_jax.train.stages import LORA, trained_parts
from dflop_jax.weights import Folder, ModuleParams, write_folder
from dflop_jax.weights.adapter import adapted_tensors

log = logging.getLogger("dflop_jax")
PASSED_OVER = "passed-over"  # of a step that is run again


def check_exports(config: Config, model: MultimodalModel) -> None:
    """ValueError where folders are asked for of a model that has no published form."""
    if config.checkpoint.export_every and not hasattr(model, "weights"):
        raise ValueError(
            f"checkpoint.export_every={config.checkpoint.export_every}: {config.model.factory} has "
            "no published form to write; leave it out, and export a part of the run with "
            "dflop export --module"
        )


def check_only_adapters(
    config: Config, model: MultimodalModel, frozen: Sequence[str] | None = None
) -> None:
    """Check that the adapters of a run, beside the published weights that it began with, are its
    model.

    Args:
      model: as it is trained.
      frozen: its parts that are frozen; None: those that the configuration freezes.

    Raises:
      ValueError: they are not.
    """
    groups = trained_groups(model, ())
    if LORA not in groups:
        raise ValueError(
            "the run has no adapters; train with train.lora_rank, or leave out --adapter"
        )
    if frozen is None:
        frozen = trained_parts(config.train, model).frozen
    if others := [name for name in groups if name != LORA and name not in frozen]:
        raise ValueError(
            f"the run also trains {', '.join(others)}, which adapters do not hold; "
            "leave out --adapter, or train under train.stage=full without rates of theirs"
        )
    if run := _trained_base(config.model.weights):
        raise ValueError(
            f"the run began with what {run} trained, which adapters do not hold; leave "
            f"out --adapter, or give an export of {run} as --weights"
        )


def _trained_base(weights: Sequence[str]) -> str:
    """The run, among those whose parameters are `model.weights`, that trained more than adapters;
    "" for none."""
    for item in weights:
        run = run_and_step(item.rpartition("=")[2])[0]
        if not Path(run, CHECKPOINTS).is_dir():
            continue
        before = run_config(run)
        rates = named_numbers(before.train.learning_rates, RATES)
        if not before.train.lora_rank or before.train.stage != "full" or {*rates} - {LORA}:
            return run
        if found := _trained_base(before.model.weights):
            return found
    return ""


def warn_of_adapters(config: Config, model: Any) -> None:
    """Say, before a run trains adapters, why they cannot be exported alone, if they cannot."""
    if not config.train.lora_rank:
        return
    try:
        check_only_adapters(config, model)
        if hasattr(model, "weights"):
            shapes = {name: shapes_of(module) for name, module in model.modules.items()}
            adapted_tensors(model.weights, shapes)
    except ValueError as e:
        log.warning("dflop export --adapter will refuse this run: %s", e)


def beside(config: Config) -> list[Path]:
    """Folders with tokenizer, template and processors of a run: the data's first, then those of the
    weights, the last module's before the others'."""
    began = [Path(folder) for folder in first_weights(config.model.weights).values()]
    tokenizer = Path(config.data.tokenizer) if config.data.tokenizer else None
    folders = [tokenizer, *reversed(began), Path(config.model.size)]
    return [folder for folder in folders if folder is not None and folder.is_dir()]


def merged_params(
    reader: CheckpointReader, model: Any, weights: Sequence[str], *, average: bool
) -> list[ModuleParams]:
    """A checkpoint's parameters without adapters, which are folded in, into the floats of `weights`
    where the run holds matrices in 8 bits; all of it when it is asked for.

    Raises:
      ValueError: see `saved_params` and `with_originals`.
    """
    held = []
    for name, params in saved_params(reader, model, average=average).items():
        fold = getattr(model.modules[name], "merged", None)
        if fold is not None:
            params = fold(with_originals(params, name, model, weights), computed)
        held.append(ModuleParams(name, params))
    return held


def export_checkpoint(
    folder: Path, out: Path, config: Config, model: Any, *, average: bool
) -> None:
    """Write a checkpoint's parameters as the model's published folder, adapters folded in.

    Raises:
      ValueError: `out` exists, or the checkpoint is of another model.
      CorruptCheckpoint, StorageError: the checkpoint cannot be read, the folder not written.
    """
    reader = CheckpointStore(folder.parent).open(int(folder.name))
    held = merged_params(reader, model, config.model.weights, average=average)
    whole = first_weights(config.model.weights).get("")
    source = Folder(whole, model.weights) if whole else None
    write_folder(out, model.weights, held, source=source, beside=beside(config))


class Exports:
    """The folders of a run, one at a time; of processes other than 0 it does nothing.

    Args:
      root: where they are written, a folder of each step.
      export: see `export_checkpoint`; called with checkpoint and folder to make.
    """

    def __init__(
        self,
        root: Path,
        every: int,
        saver: Checkpointer,
        export: Callable[[Path, Path], None],
        *,
        is_first: bool,
    ) -> None:
        self._root, self._every, self._saver, self._export = root, every, saver, export
        self._is_first = is_first and every > 0
        self._wanted: list[int] = []  # the first one is under way where there is a thread
        self._thread: threading.Thread | None = None
        self.trouble = ""  # why the last one failed

    @classmethod
    def of(
        cls, config: Config, model: MultimodalModel, saver: Checkpointer, *, is_first: bool
    ) -> Exports:
        """Those of a run, of the average of the parameters where it keeps one."""
        average = bool(config.train.ema)
        export = partial(export_checkpoint, config=config, model=model, average=average)
        root, every = Path(config.run_dir, EXPORTS), config.checkpoint.export_every
        return cls(root, every, saver, export, is_first=is_first)

    def folder(self, step: int) -> Path:
        return self._root / f"{step:08d}"

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is to be exported."""
        return self._every > 0 and step % self._every == 0

    def begin_at(self, start: int, saved: Iterable[int]) -> None:
        """A run goes on after step `start`: folders of later steps are set aside, and what an
        interrupted run did not finish is wanted again."""
        if not self._is_first:
            return
        for old in self._root.glob("*"):
            if old.name.isdecimal() and int(old.name) > start:
                aside = old.with_name(f"{old.name}.{PASSED_OVER}")
                shutil.rmtree(aside, ignore_errors=True)
                old.rename(aside)
        for step in sorted(saved):
            if step and step <= start and self.is_due(step):
                self.want(step)

    def want(self, step: int) -> None:
        """Export the state after a step, which is saved or on its way, unless it is there."""
        if self._is_first and step not in self._wanted and not self.folder(step).exists():
            self._wanted.append(step)
            self._saver.hold(self._wanted)

    def look(self) -> None:
        """Begin with the next one whose checkpoint is whole, if none is under way."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self._thread = None
            del self._wanted[0]
            self._saver.hold(self._wanted)
        if not self._wanted or self._saver.is_busy:
            return
        saved = self._saver.steps()
        self._wanted = [step for step in self._wanted if step in saved]
        self._saver.hold(self._wanted)
        if self._wanted:
            args = (self._wanted[0],)
            self._thread = threading.Thread(target=self._run, args=args, name="export", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Write all that is wanted, whose checkpoints are saved by now."""
        self.look()
        while self._thread is not None:
            self._thread.join()
            self.look()

    def _run(self, step: int) -> None:
        self.trouble = ""
        try:
            self._export(self._saver.folder_of(step), self.folder(step))
            shutil.rmtree(f"{self.folder(step)}.{PASSED_OVER}", ignore_errors=True)
        except (OSError, ValueError) as e:  # of the checkpoint's, too
            self.trouble = " ".join(str(e).split())
            log.warning("no export after step %d: %s", step, self.trouble)
