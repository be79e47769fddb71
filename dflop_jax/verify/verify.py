"""Verify a folder of published weights: a bit-exact round trip, and a comparison of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from dflop_jax.config import ModelConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.preflight.model_folder import factory_of
from dflop_jax.records import Plan
from dflop_jax.train.run_context import build_model, select_devices
from dflop_jax.verify import compare, reference
from dflop_jax.verify.reference import Reference
from dflop_jax.verify.round_trip import TP_DEGREE, TensorGroup, round_trip, split_layout
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import Folder, read_config

MAX_DEVICES = 2 * TP_DEGREE  # emulated on the CPU
# Largest relative errors (see `VerifyResult`) that count as equal: both sides compute in float32,
# but sum in different orders.
LOGIT_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# If transformers' own float32 error to its float64 is larger, our error to float64 may be this many
# times as large as its own.
MAX_ROUNDING_RATIO = 3.0


@dataclass(frozen=True)
class VerifyResult:
    """Result of verifying a folder. Errors are relative to transformers in float32, or in float64
    if they are too large in float32; None: not compared."""

    folder: str
    model_type: str
    bit_identical: bool  # whether the round trip changed no bit of any tensor
    max_logit_error: float | None  # relative to `largest_logit`, or to 1 if that is smaller
    max_grad_error: float | None  # relative to the largest entry of its tensor
    largest_logit: float | None  # of transformers
    not_compared: str  # why there was no comparison; "" if there was one
    groups: tuple[TensorGroup, ...]
    # (logit, gradient) errors of transformers' float32 to its float64; None: not computed
    rounding: tuple[float, float] | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """Return the largest (logit, gradient) errors that count as equal."""
        logit, gradient = self.rounding or (0.0, 0.0)
        return (
            max(LOGIT_TOLERANCE, MAX_ROUNDING_RATIO * logit),
            max(GRADIENT_TOLERANCE, MAX_ROUNDING_RATIO * gradient),
        )

    @property
    def exit_code(self) -> int:
        """Return 0 if everything that was compared is equal, else 1."""
        if self.max_logit_error is None or self.max_grad_error is None:
            return 0 if self.bit_identical else 1
        logit, gradient = self.limits
        # NaN compares false, so it counts as an error.
        equal = self.max_logit_error <= logit and self.max_grad_error <= gradient
        return 0 if self.bit_identical and equal else 1


def verify(
    path: Path, plan: Plan | None = None, tick: Callable[[int, int], None] = lambda *_: None
) -> VerifyResult:
    """Read a folder into the shards of a plan (None: `split_layout`) and compare them with its
    files. If transformers is installed and memory suffices, also compare logits and gradients on
    samples, in float64 if float32 differs too much. Calls `tick(segments done, all segments)`.
    ValueError for a missing or incomplete folder, an unknown model, or another model's plan."""
    config = read_config(path)
    kind, factory = config.get("model_type"), factory_of(config, path)
    assert isinstance(kind, str), "`factory_of` requires it"
    try:  # before other calls initialize jax, which fixes the number of devices
        devices = select_devices(plan.layout.n_devices if plan else MAX_DEVICES)
    except ValueError:  # fewer GPUs
        if plan:
            raise
        devices = jax.devices()
    model: MultimodalModel = build_model(ModelConfig(factory, str(path), dtype="float32"))
    folder = Folder(path, model.weights)  # type: ignore[attr-defined]
    folder.check()
    layout = plan.layout if plan else split_layout(model, len(devices), folder.map.tensors)
    groups = round_trip(folder, model, layout, devices, tick)
    is_identical = all(g.identical == g.tensors for g in groups)
    reason = reference.missing_packages() or compare.describe_memory_shortage(folder)
    result = VerifyResult(str(path), kind, is_identical, None, None, None, reason, tuple(groups))
    return result if result.not_compared else _add_errors(result, folder, model)


def _add_errors(result: VerifyResult, folder: Folder, model: MultimodalModel) -> VerifyResult:
    samples = mixed_samples(model)
    params = compare.read_model(folder, model, jax.local_devices(backend="cpu")[0])
    logits, gradients = compare.run_model(model, params, samples)
    name = folder.map.config["architectures"][0]
    run = partial(reference.run_reference, folder.path, result.model_type, name, samples)

    def with_errors(wanted: Reference) -> VerifyResult:
        error, largest = compare.logit_errors(logits, wanted)
        errors = compare.gradient_errors(folder.map, gradients, wanted.gradients)
        return replace(
            result,
            max_logit_error=error,
            largest_logit=largest,
            max_grad_error=float(np.max(list(errors.values()))),  # NaN stays
            groups=tuple(replace(g, max_grad_error=errors.get(g.name)) for g in result.groups),
        )

    single = run()
    in_float32 = with_errors(single)
    equal = replace(in_float32, bit_identical=True).exit_code == 0
    if equal or compare.describe_memory_shortage(folder, double=True):
        return in_float32
    exact = run(double=True)
    return replace(with_errors(exact), rounding=compare.rounding_errors(single, exact))
