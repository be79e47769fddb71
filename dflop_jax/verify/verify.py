"""All that is asked of a folder of published weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from dflop_jax.verify.round_trip import TensorGroup, round_trip, split_layout
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import Folder, read_config

MAX_DEVICES = 4  # at most; pretended where only the CPU is there
# Largest errors that count as equal, as `VerifyResult` has them: both sides compute in float32 and
# add in other orders.
LOGIT_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Where transformers' float32 is further than that from its own float64, we may be as many times as
# far from it: two ways of rounding the same.
MAX_ROUNDING_RATIO = 3.0


@dataclass(frozen=True)
class VerifyResult:
    """What a folder's weights are worth here.

    Attributes:
      bit_identical: whether every tensor was written as it is in the folder.
      max_logit_error: largest difference to the logits of transformers in float32, as a share of
        the largest of these, of 1 at least; None: not compared. Where errors are too large so, they
        are those to transformers in float64.
      largest_logit: of transformers.
      max_grad_error: largest difference to a gradient of transformers, as a share of the largest
        entry of its tensor; None: not compared.
      rounding: of transformers' float32 to its float64, the same (logit, gradient) errors; None
        where float64 was not asked, or there is no memory for it.
      not_compared: why there are no errors; "" if there are.
    """

    folder: str
    model_type: str
    bit_identical: bool
    max_logit_error: float | None
    max_grad_error: float | None
    largest_logit: float | None
    not_compared: str
    groups: tuple[TensorGroup, ...]
    rounding: tuple[float, float] | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The largest (logit, gradient) errors that count as equal."""
        logit, gradient = self.rounding or (0.0, 0.0)
        return (
            max(LOGIT_TOLERANCE, MAX_ROUNDING_RATIO * logit),
            max(GRADIENT_TOLERANCE, MAX_ROUNDING_RATIO * gradient),
        )

    @property
    def exit_code(self) -> int:
        """0 if all that was compared is equal."""
        equal = self.bit_identical
        if self.max_logit_error is not None and self.max_grad_error is not None:
            logit, gradient = self.limits
            # Written so that an error that is no number counts as one.
            equal &= self.max_logit_error <= logit
            equal &= self.max_grad_error <= gradient
        return 0 if equal else 1


def verify(
    path: Path, plan: Plan | None = None, tick: Callable[[int, int], None] = lambda *_: None
) -> VerifyResult:
    """Read a folder into shards and write it again; where transformers is installed and the memory
    suffices, compare its logits and gradients on pictures, clips, sounds and text; with float64
    where float32 differs too much.

    Args:
      plan: whose shards; one that cuts every module and splits its tensors if not given.
      tick: is told how many of how many segments are read and written.

    Raises:
      ValueError: no such folder, of a model that is not known, or one that does not hold it; a plan
        of another model.
    """
    config = read_config(path)
    kind, factory = config.get("model_type"), factory_of(config, path)
    assert isinstance(kind, str), "the factory goes by it"
    # Before anything else asks for devices, which fixes how many there are.
    devices = select_devices(plan.layout.n_devices) if plan else _find_devices()
    model: MultimodalModel = build_model(ModelConfig(factory, str(path), dtype="float32"))
    folder = Folder(path, model.weights)  # type: ignore[attr-defined]
    folder.check()
    layout = plan.layout if plan else split_layout(model, len(devices), folder.map.tensors)
    groups = round_trip(folder, model, layout, devices, tick)
    result = VerifyResult(
        folder=str(path),
        model_type=kind,
        bit_identical=all(g.identical == g.tensors for g in groups),
        max_logit_error=None,
        max_grad_error=None,
        largest_logit=None,
        not_compared=reference.missing_packages() or compare.too_large(folder),
        groups=tuple(groups),
    )
    return result if result.not_compared else _add_errors(result, folder, model)


def _find_devices() -> list[jax.Device]:
    try:
        return select_devices(MAX_DEVICES)
    except ValueError:  # fewer GPUs
        return jax.devices()


def _add_errors(result: VerifyResult, folder: Folder, model: MultimodalModel) -> VerifyResult:
    samples = mixed_samples(model)
    params = compare.read_model(folder, model, jax.local_devices(backend="cpu")[0])
    logits, gradients = compare.run_model(model, params, samples)
    name = folder.map.config["architectures"][0]
    reference_run = reference.run_reference(folder.path, result.model_type, name, samples)

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

    in_float32 = with_errors(reference_run)
    equal = replace(in_float32, bit_identical=True).exit_code == 0
    if equal or compare.too_large(folder, compare.FLOAT64_COPIES):
        return in_float32
    exact = reference.run_reference(folder.path, result.model_type, name, samples, double=True)
    return replace(with_errors(exact), rounding=compare.rounding_errors(reference_run, exact))
