"""The schema of a row of metrics: one row per training step.

metrics.jsonl, the trackers, summaries, charts and comparisons derive their names, units and labels
from the fields of `StepMetrics`.
"""

# ruff: noqa: RUF009 (the called functions return a `field`)
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

# Number of first steps that steady-state figures leave out: caches, queues and the solver warm up.
WARMUP_STEPS = 2
# The key of idle seconds in `phase_s`, beside directions of tasks ("forward", ...) and reasons of
# waiting ("wait for data", ...); and the keys of `memory`.
IDLE = "idle"
LIVE_BYTES, PEAK_BYTES, HOST_BYTES = "live_bytes", "peak_bytes", "host_bytes"
PEAK_UPPER_BOUND = "peak_bytes_upper_bound"


@dataclass(frozen=True)
class SkippedUpdate:
    """The reason why a step changed no parameter."""

    why: str  # "not finite" or "spike"
    modules: tuple[str, ...]  # modules with gradients that are not finite, in backward order
    samples: tuple[str, ...]  # names of the batch's samples


class Column(NamedTuple):
    """The presentation of a metrics field in trackers and reports."""

    unit: str = ""  # "s", "%" (of 1), "bytes", "FLOP", "FLOP/s", or "" for others
    label: str = ""  # label of its median in tables, with "{}" for a key; "": not in tables
    chart: str = ""  # title of its chart over the steps; "": no chart
    is_tracked: bool = False  # whether TensorBoard and W&B get it


Keyed = Mapping[str, float]  # numbers by name of a submesh, a module, a process, ...


def _scalar(*column: Any, default: Any = 0.0, is_tracked: bool = False) -> Any:
    shown = {"column": Column(*column)._replace(is_tracked=is_tracked)}
    return field(metadata=shown) if default is MISSING else field(default=default, metadata=shown)


def _keyed(*column: Any, is_tracked: bool = False) -> Any:
    shown = {"column": Column(*column)._replace(is_tracked=is_tracked)}
    return field(default_factory=dict, metadata=shown)


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one optimizer step, the fields of a row of metrics.jsonl. Numbers that are not
    finite are null in the file. docs/watching.md explains every field."""

    step: int = _scalar(default=MISSING)  # from 0
    loss: float = _scalar(default=MISSING, is_tracked=True)  # per supervised token, all modules
    supervised_tokens: int = _scalar(default=MISSING)  # tokens of the batch with a weight above 0
    step_s: float = _scalar("s", default=MISSING, is_tracked=True)  # since the previous step's end
    learning_rate: float = _scalar()  # of parts without their own rate
    learning_rates: Keyed = _keyed(is_tracked=True)  # of each part that trains
    losses: Keyed = _keyed()  # of each module, before it is weighted
    grad_norm: float = _scalar(is_tracked=True)  # global, before clipping
    skipped: SkippedUpdate | None = _scalar(default=None)  # None: parameters changed
    # Tokens of samples in the last module.
    tokens_per_s: float = _scalar("", "tokens / s", is_tracked=True)
    # FLOPs of the model, without padding and recomputation.
    model_flops: float = _scalar("FLOP", "model FLOP a step")
    model_flops_by_module: Keyed = _keyed("FLOP")
    # `model_flops` / `step_s`.
    flops_per_s: float = _scalar("FLOP/s", "model FLOP / s", is_tracked=True)
    # `flops_per_s` divided by the peak of all devices, or of the devices of a module.
    mfu: float | None = _scalar("%", "MFU", default=None, is_tracked=True)
    mfu_by_module: Keyed = _keyed("%", "MFU, {}", "MFU")
    flops_per_s_by_module: Keyed = _keyed("FLOP/s", "model FLOP / s, {}", "model FLOP a second")
    # Share of padding in a module's tokens.
    padding_fraction: Keyed = _keyed("%", "padding, {}", "padding", is_tracked=True)
    # Maximum over mean tokens of a data rank, minus 1, over all groups.
    imbalance: Keyed = _keyed("%", "imbalance, {}", "imbalance: fullest over mean data rank")
    phase_s: Keyed = _keyed("s", "{}, of a step")  # mean over devices; the sum is `step_s`
    busy_fraction: Keyed = _keyed("%", is_tracked=True)  # of the makespan, by submesh
    # Maximum over devices (live while nothing is in flight, peak since training began or an upper
    # bound of it) or processes (host).
    memory: Keyed = _keyed("bytes", "", "memory in use")
    groups: Mapping[str, int] = _keyed()  # number of groups by MODULE:ROWSxTOKENS
    compiles: int = _scalar(default=0)  # programs compiled during the step
    n_bad: int = _scalar(default=0)  # samples that could not be decoded and were replaced
    schedule_wait_s: float = _scalar("s")
    save_wait_s: float = _scalar("s")
    schedule_s: float = _scalar("s", "schedule solved in")  # in the scheduler's process
    schedule_work: int = _scalar(default=0)  # units of work of the solver
    made_by: str = _scalar(default="")  # the method that found the schedule
    makespan_s: float = _scalar("s", "makespan, scheduled")
    lower_bound_s: float = _scalar("s")  # lower bound on the makespan of every schedule
    # Lower bound by the integer program; 0: it was not solved.
    integer_bound_s: float = _scalar("s")
    # `makespan_s` / `lower_bound_s` - 1.
    schedule_gap: float = _scalar("%", "schedule over its proved bound", default=math.nan)
    # Seconds of this step's batch, simulated by the same prices without data-aware scheduling, by
    # name of the baseline; empty for most steps (see `schedule.baselines`).
    baseline_s: Keyed = _keyed("s", "step simulated, {}", is_tracked=True)
    # Bytes of features sent to other data ranks of the node, or to other nodes, by SOURCE > TARGET.
    moved_in_node: Keyed = _keyed("bytes")
    moved_across_nodes: Keyed = _keyed("bytes")
    # State of the correction after the last sampled step: sampling (1: on), farthest_factor,
    # predicted_gain_s, overhead_s; empty if predictions are not corrected.
    correction: Keyed = _keyed()
    # Seconds of computing without waiting, of the 32 slowest processes; empty for one process.
    process_s: Keyed = _keyed("s")
    own: Keyed = _keyed("", "own metric {}, median", is_tracked=True)  # from user callbacks

    def __post_init__(self) -> None:
        if self.step < 0 or not 0 <= self.step_s < math.inf:
            raise ValueError(f"a step needs step >= 0 and a finite step_s >= 0, got {self}")


COLUMNS: dict[str, Column] = {f.name: f.metadata["column"] for f in fields(StepMetrics)}
_HINTS = get_type_hints(StepMetrics)
# Fields that are a number, and fields that are numbers by name.
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


# A row as reports read it; rows of other versions need only step and step_s.
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
    """Return the percentiles of the finite values; nan if there are none."""
    finite = [v for v in values if math.isfinite(v)] or [math.nan]
    return Percentiles(*np.percentile(finite, [10, 50, 90]).tolist())
