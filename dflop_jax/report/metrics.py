"""One row of numbers per training step, and the statistics that the reports share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """Why a step changed no parameter ("not finite" or "spike"); the modules whose gradients are
    not finite, the first one in backward's order first; the batch's samples by name."""

    why: str
    modules: tuple[str, ...]
    samples: tuple[str, ...]


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did; a row of metrics.jsonl has exactly these fields.

    `loss` is per supervised token of the global batch, added up over the modules that have one.
    `losses` has it by module, each without its weight in that sum. `learning_rates` are those of
    the parts that train (`learning_rate` that of parts without one of their own). `busy_fraction`
    is per submesh, `groups` counts the groups of each module and shape (MODULE:ROWSxTOKENS).
    `compiles` counts programs compiled during this step. `schedule_wait_s` is what the step waited
    for its schedule, `save_wait_s` what it waited for a checkpoint. `made_by` says what found the
    schedule, `lower_bound_s` what no other undercuts, `schedule_gap` how much longer it is,
    `integer_bound_s` what an integer program proved of that (0: it was not asked), `schedule_work`
    the units of work that it took. `n_bad` counts samples of this batch that could not be decoded
    and were replaced, each in the first such batch of the run.
    `correction` (empty unless predictions are corrected) holds `sampling` (1: task times are being
    sampled), `farthest_factor`, `predicted_gain_s` and `overhead_s` of the last sample. `process_s`
    are the seconds that a process computed without waiting for others, by process (of the 32
    slowest; empty in a run of one). `skipped` is null where the step updated the parameters.
    Numbers that are not finite are null in the file.

    `tokens_per_s` counts tokens of samples, not padding, in the last module. `padding_fraction` is
    per module the share of executed tokens that are padding. `schedule_s` is the solver's time off
    the training path, `makespan_s` the schedule's. `model_flops` are the FLOPs that the batch
    needs, without padding and recomputation; `flops_per_s` are these over `step_s`; `mfu` is that
    over the peak of all devices of the run, null where no peak is known. A module's `mfu_by_module`
    is over the peak of the devices that hold it. `moved_in_node` and `moved_across_nodes` are bytes
    of features that went to another data rank for each pair of modules ("source > target"),
    forward; as many bytes of gradients came back. `phase_s` has the seconds of the step by what the
    mean device did in them, `imbalance` per module how many more tokens the fullest data rank has
    than the mean one, relative, over all groups. `memory_bytes` are those of the process or device
    that holds most: in use on a "device", the most so far there ("device_peak"), on the "host".
    `own` has the numbers of the user's callbacks.
    """

    step: int
    loss: float
    supervised_tokens: int
    step_s: float
    learning_rate: float = 0.0
    grad_norm: float = 0.0
    busy_fraction: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    compiles: int = 0
    schedule_wait_s: float = 0.0
    lower_bound_s: float = 0.0
    made_by: str = ""
    schedule_gap: float = math.nan
    integer_bound_s: float = 0.0
    schedule_work: int = 0
    n_bad: int = 0
    save_wait_s: float = 0.0
    correction: Mapping[str, float] = field(default_factory=dict)
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    model_flops_by_module: Mapping[str, float] = field(default_factory=dict)
    process_s: Mapping[str, float] = field(default_factory=dict)
    skipped: SkippedUpdate | None = None
    tokens_per_s: float = 0.0
    padding_fraction: Mapping[str, float] = field(default_factory=dict)
    schedule_s: float = 0.0
    makespan_s: float = 0.0
    model_flops: float = 0.0
    flops_per_s: float = 0.0
    flops_per_s_by_module: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    mfu_by_module: Mapping[str, float] = field(default_factory=dict)
    moved_in_node: Mapping[str, float] = field(default_factory=dict)
    moved_across_nodes: Mapping[str, float] = field(default_factory=dict)
    phase_s: Mapping[str, float] = field(default_factory=dict)
    imbalance: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 0 or not 0 <= self.step_s < math.inf:
            raise ValueError(f"a step needs step >= 0 and a finite step_s >= 0, got {self}")


_HINTS = get_type_hints(StepMetrics)
# Fields that hold a number, and those that hold one by name (of a submesh, a module, a process).
SCALAR_FIELDS = tuple(n for n, kind in _HINTS.items() if kind in (int, float, float | None))
KEYED_FIELDS = tuple(n for n, k in _HINTS.items() if k in (Mapping[str, float], Mapping[str, int]))
# What trackers get of a row.
TRACKED_FIELDS = (
    "loss", "grad_norm", "step_s", "tokens_per_s", "flops_per_s", "mfu", "learning_rates",
    "busy_fraction", "padding_fraction", "own",
)  # fmt: skip
ColumnKey = str | tuple[str, str]  # a field, or a field and a key


def iter_numbers(row: Any, names: Iterable[str]) -> Iterator[tuple[ColumnKey, float]]:
    """The numbers in some fields of a `StepMetrics` or a `MetricsRow`."""
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
    """The 10th, 50th and 90th percentile of a sample."""

    p10: float
    median: float
    p90: float


def percentiles(values: Iterable[float]) -> Percentiles:
    """That of the finite values; all nan when there is none."""
    finite = [v for v in values if math.isfinite(v)] or [math.nan]
    return Percentiles(*np.percentile(finite, [10, 50, 90]).tolist())
