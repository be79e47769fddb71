"""How much of the devices' FLOP/s a step's needed FLOPs come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dflop_jax.config import Config
from dflop_jax.hardware import chip_peak_flops
from dflop_jax.records import Layout


@dataclass(frozen=True)
class Peaks:
    """Peak FLOP/s of all devices of a run, and by module of those that hold it."""

    run: float
    by_module: dict[str, float]

    @classmethod
    def of(cls, config: Config, layout: Layout, devices: Sequence[jax.Device]) -> Peaks | None:
        """Return the peaks by `train.peak_flops`, else by the name of the chip and the compute
        dtype; None where neither says it."""
        stated, chip = config.train.peak_flops, devices[0].device_kind
        each = stated or chip_peak_flops(chip, config.model.dtype)
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
