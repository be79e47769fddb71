"""How much of the devices' FLOP/s a step's needed FLOPs come to, and what a plan promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dflop_jax.config import Config
from dflop_jax.hardware import chip_peak_flops
from dflop_jax.profile.needed import needed_flops
from dflop_jax.records import DataProfile, Hardware, Layout, Plan
from dflop_jax.train.prepare import Workplace, in_steps


def _peak_flops(
    config: Config, devices: Sequence[jax.Device], hardware: Hardware | None
) -> float | None:
    """Peak FLOP/s of a device, or of hardware that is planned for; None where nothing says it, as
    of cores of a host."""
    dtype = config.model.dtype
    if config.train.peak_flops or not (devices or hardware):
        return config.train.peak_flops
    if hardware:
        return None if hardware.name == "cpu" else hardware.peak_flops(dtype)
    return chip_peak_flops(devices[0].device_kind, dtype)


@dataclass(frozen=True)
class Peaks:
    """Peak FLOP/s of all devices of a run, and by module of those that hold it."""

    run: float
    by_module: dict[str, float]

    @classmethod
    def of(cls, config: Config, layout: Layout, devices: Sequence[jax.Device]) -> Peaks | None:
        """Return the peaks by `train.peak_flops`, else by the name of the chip and the compute
        dtype; None where neither says it."""
        each = _peak_flops(config, devices, None)
        if not each:
            return None
        held = {
            m: {d for s in layout.segments_of(m) for d in layout.submesh(s.submesh).devices}
            for m in layout.modules
        }
        return cls(each * len(devices), {m: each * len(on) for m, on in held.items()})


def utilisation(flops: Mapping[str, float], step_s: float, peaks: Peaks | None) -> dict[str, Any]:
    """Return the fields of `StepMetrics` about FLOPs, from those needed by module; rates are 0
    where a step took no time."""
    per_s = {m: n / step_s if step_s > 0 else 0.0 for m, n in flops.items()}
    total_per_s = sum(per_s.values())
    fields: dict[str, Any] = {
        "model_flops": sum(flops.values()),
        "model_flops_by_module": dict(flops),
        "flops_per_s": total_per_s,
        "flops_per_s_by_module": per_s,
    }
    if peaks is not None:
        fields["mfu"] = total_per_s / peaks.run
        fields["mfu_by_module"] = {m: rate / peaks.by_module[m] for m, rate in per_s.items()}
    return fields


def row_tokens(layout: Layout) -> dict[str, int]:
    """Tokens of the shortest rows that are compiled of each module."""
    return {m: min(s.tokens for s in layout.shapes(m)) for m in layout.modules if layout.shapes(m)}


@dataclass(frozen=True)
class ExpectedRun:
    """What a plan's predicted step comes to over a run.

    Attributes:
      steps, run_s: all steps, and their seconds.
      tokens_per_s: of samples, not padding, in the last module, as metrics have it.
      mfu: needed FLOP/s over the peak of all devices; None where no peak is known.
    """

    steps: int
    run_s: float
    tokens_per_s: float
    mfu: float | None


def expected_run(place: Workplace, data: DataProfile, plan: Plan) -> ExpectedRun:
    """Return what the steps of a run take under a plan, of samples such as the profile's."""
    config, step_s = place.config, plan.predicted.makespan_s
    train = in_steps(place, data.n_total).config.train
    batches_per_s = train.global_batch / len(data.loads) / step_s  # of loads such as all of these
    last, mfu = plan.layout.modules[-1], None
    tokens = sum(load.tokens(last) for load in data.loads)
    run_flops = place.n_devices * (_peak_flops(config, place.devices, place.hardware) or 0.0)
    if run_flops:
        needed = needed_flops(place.model, row_tokens(plan.layout), place.trained.frozen)
        flops = sum(
            sum(map(of_piece, load.lengths(module), load.content_of(module)))
            for module, of_piece in needed.items()
            for load in data.loads
        )
        mfu = flops * batches_per_s / run_flops
    return ExpectedRun(train.steps, train.steps * step_s, tokens * batches_per_s, mfu)
