"""The schema of a row of metrics: one row per training step.

metrics.jsonl, the trackers, summaries, charts and comparisons derive their names, units and labels
from the fields of `StepMetrics`.
"""

# ruff: noqa: RUF009 (what is called gives a `field`)
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

# Steps left out of every steady-state figure: they warm caches, queues and the solver up.
WARMUP_STEPS = 2
# Of `phase_s`, what is left beside a task's direction ("forward", "backward", "reduce", "update")
# and what devices waited for ("wait for data", ...). Of `memory_bytes`, what holds the bytes.
IDLE = "idle"
DEVICE, DEVICE_PEAK, HOST = "device", "device_peak", "host"


@dataclass(frozen=True)
class SkippedUpdate:
    """Why a step changed no parameter."""

    why: str  # "not finite" or "spike"
    modules: tuple[str, ...]  # whose gradients are not finite, in backward's order
    samples: tuple[str, ...]  # of the batch, by name


class Column(NamedTuple):
    """How trackers and reports show a field of a row."""

    unit: str = ""  # "s", "%" (of 1), "bytes", "FLOP", "FLOP/s", or "" for others
    label: str = ""  # of its median in tables of figures, with "{}" for a key; "": not there
    chart: str = ""  # title of its chart over the steps; "": there is none
    is_tracked: bool = False  # whether TensorBoard and W&B get it


Keyed = Mapping[str, float]  # numbers by name: of a submesh, a module, a process


def _number(*column: Any, default: Any = 0.0, is_tracked: bool = False) -> Any:
    shown = {"column": Column(*column)._replace(is_tracked=is_tracked)}
    return field(metadata=shown) if default is MISSING else field(default=default, metadata=shown)


def _by_key(*column: Any, is_tracked: bool = False) -> Any:
    shown = {"column": Column(*column)._replace(is_tracked=is_tracked)}
    return field(default_factory=dict, metadata=shown)


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did; a row of metrics.jsonl has exactly these fields. Numbers that
    are not finite are null in the file. docs/watching.md explains every field."""

    step: int = _number(default=MISSING)  # from 0
    loss: float = _number(default=MISSING, is_tracked=True)  # per supervised token, all modules
    supervised_tokens: int = _number(default=MISSING)  # of the batch, with a weight above 0
    step_s: float = _number("s", default=MISSING, is_tracked=True)  # since the previous step's end
    learning_rate: float = _number()  # of parts without a rate of their own
    learning_rates: Keyed = _by_key(is_tracked=True)  # of each part that trains
    losses: Keyed = _by_key()  # of each module, without its weight in the sum
    grad_norm: float = _number(is_tracked=True)  # global, before clipping
    skipped: SkippedUpdate | None = _number(default=None)  # why no parameter changed
    # Of samples in the last module.
    tokens_per_s: float = _number("", "tokens / s", is_tracked=True)
    # Needed FLOPs, without padding and recomputation.
    model_flops: float = _number("FLOP", "model FLOP a step")
    model_flops_by_module: Keyed = _by_key("FLOP")
    # `model_flops` over `step_s`.
    flops_per_s: float = _number("FLOP/s", "model FLOP / s", is_tracked=True)
    # `flops_per_s` over the peak of all devices, or of those that hold a module.
    mfu: float | None = _number("%", "MFU", default=None, is_tracked=True)
    mfu_by_module: Keyed = _by_key("%", "MFU, {}", "MFU")
    flops_per_s_by_module: Keyed = _by_key("FLOP/s", "model FLOP / s, {}", "model FLOP a second")
    # Padding in a module's tokens.
    padding_fraction: Keyed = _by_key("%", "padding, {}", "padding", is_tracked=True)
    # Tokens of the fullest data rank over the mean one, less 1, over all groups.
    imbalance: Keyed = _by_key("%", "imbalance, {}", "imbalance: fullest over mean data rank")
    phase_s: Keyed = _by_key("s", "{}, of a step")  # what the mean device did
    busy_fraction: Keyed = _by_key("%", is_tracked=True)  # of the makespan, by submesh
    # Of the process or device that holds most: in use, peak so far, on the host.
    memory_bytes: Keyed = _by_key("bytes", "memory, {}", "memory in use")
    groups: Mapping[str, int] = _by_key()  # of a module and shape, MODULE:ROWSxTOKENS
    compiles: int = _number(default=0)  # programs compiled during the step
    n_bad: int = _number(default=0)  # samples that could not be decoded and were replaced
    schedule_wait_s: float = _number("s")
    save_wait_s: float = _number("s")
    schedule_s: float = _number("s", "schedule solved in")  # off the training path
    schedule_work: int = _number(default=0)  # units of work of the solver
    made_by: str = _number(default="")  # what found the schedule
    makespan_s: float = _number("s", "makespan, scheduled")
    lower_bound_s: float = _number("s")  # that no schedule undercuts
    # What an integer program proved of that; 0: it was not solved.
    integer_bound_s: float = _number("s")
    # Makespan over its bound, less 1.
    schedule_gap: float = _number("%", "schedule over its proved bound", default=math.nan)
    # Features sent to another data rank of the node, or to other nodes, by SOURCE > TARGET.
    moved_in_node: Keyed = _by_key("bytes")
    moved_across_nodes: Keyed = _by_key("bytes")
    # Of the last sample of task times: sampling (1: now), farthest_factor, predicted_gain_s,
    # overhead_s; empty where predictions are not corrected.
    correction: Keyed = _by_key()
    # Computing without waiting, of the 32 slowest processes; empty of one.
    process_s: Keyed = _by_key("s")
    own: Keyed = _by_key("", "own metric {}, median", is_tracked=True)  # of the user's callbacks

    def __post_init__(self) -> None:
        if self.step < 0 or not 0 <= self.step_s < math.inf:
            raise ValueError(f"a step needs step >= 0 and a finite step_s >= 0, got {self}")


COLUMNS: dict[str, Column] = {f.name: f.metadata["column"] for f in fields(StepMetrics)}
_HINTS = get_type_hints(StepMetrics)
# Fields that hold a number, and those that hold one by name.
SCALAR_FIELDS = tuple(n for n, kind in _HINTS.items() if kind in (int, float, float | None))
KEYED_FIELDS = tuple(n for n, k in _HINTS.items() if k in (Keyed, Mapping[str, int]))
TRACKED_FIELDS = tuple(name for name, column in COLUMNS.items() if column.is_tracked)
ColumnKey = str | tuple[str, str]  # a field, or a field and a key


def iter_numbers(row: Any, names: Iterable[str]) -> Iterator[tuple[ColumnKey, float]]:
    """Yield the numbers in some fields of a `StepMetrics` or a `MetricsRow`."""
    for name in names:
        value = getattr(row, name)
        if isinstance(value, int | float):
            yield name, value
        else:
            yield from (((name, key), v) for key, v in (value or {}).items() if v is not None)


# What reports read of a row, of other versions too: only step and step_s have to be there.
MetricsRow = msgspec.defstruct(
    "MetricsRow",
    [
        ("step", int),
        ("step_s", float),
        *((n, float | None, None) for n in SCALAR_FIELDS if n not in ("step", "step_s")),
        *((n, dict[str, float | None] | None, None) for n in KEYED_FIELDS),
        ("skipped", SkippedUpdate | None, None),
        ("made_by", str | None, None),
    ],
)


class Percentiles(NamedTuple):
    p10: float
    median: float
    p90: float


def percentiles(values: Iterable[float]) -> Percentiles:
    """Return those of the finite values; all nan when there is none."""
    finite = [v for v in values if math.isfinite(v)] or [math.nan]
    return Percentiles(*np.percentile(finite, [10, 50, 90]).tolist())
