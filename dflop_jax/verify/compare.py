"""The same samples through a folder's weights here and in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any

import jax
import numpy as np

from dflop_jax.contract import Array, MultimodalModel, Params, chip_of, on_chip
from dflop_jax.distributed.devices import available_host_bytes
from dflop_jax.generate.decoding import inlet_layers, run_decoder
from dflop_jax.generate.row import LLM, AnswerRows, add_features, pack_row
from dflop_jax.hardware import GB
from dflop_jax.runtime.module_parts import module_structs
from dflop_jax.verify.reference import Reference
from dflop_jax.verify.samples import MixedSample
from dflop_jax.weights import Folder, read_params, to_file_layout
from dflop_jax.weights.contract import WeightMap

TOKEN_MULTIPLE = 8  # of a row's tokens
# A gradient that is zero in theory (of a key's bias) is rounding on both sides: of a tensor whose
# largest entry is below this share of the largest of all, that is what errors are a share of.
MIN_SCALE = 1e-3
# Compiled for seconds and run for milliseconds: no optimisation.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COPIES = 3  # parameters and their gradients here, then gradients here and both there


def too_large(folder: Folder, *, double: bool = False) -> str:
    """Why there is no memory to run both sides, and with `double` transformers also in float64; ""
    if there is, or if nobody says how much."""
    n = sum(int(np.prod(t.layout.file_shape)) for t in folder.map.tensors)
    needed = COPIES * (1 + double) * np.dtype(np.float32).itemsize * n
    free = available_host_bytes()
    if free is None or needed <= free:
        return ""
    return f"it takes {needed / GB:.0f} GB of memory, {free / GB:.0f} are free"


def run_model(
    model: MultimodalModel, params: dict[str, Params], samples: Sequence[MixedSample]
) -> tuple[np.ndarray, dict[str, Params]]:
    """Run the samples packed in one row, on the CPU, where `params`, layers stacked, are. Returns
    logits float32 [tokens, vocab] of the samples one after the other, and the gradient of the sum
    of their losses, as parameters lie."""
    row = pack_row([s.sample for s in samples], model, TOKEN_MULTIPLE)
    chip = chip_of(jax.local_devices(backend="cpu")[0])
    run = jax.jit(partial(_loss, model, chip), compiler_options=COMPILER_OPTIONS)
    gradients, logits = run(params, row)
    return np.asarray(logits[0, : int(row.lengths[0])]), gradients


def _loss(
    model: MultimodalModel, chip: str, params: dict[str, Params], row: AnswerRows
) -> tuple[dict[str, Params], Array]:
    """The gradients of a row's loss, and its logits."""
    llm: Any = on_chip(model.modules[LLM], chip)
    inlets = inlet_layers(model)

    def objective(params: dict[str, Params]) -> tuple[Array, Array]:
        llm_params = params[LLM]
        batch = add_features(model, chip, params, row)
        x, _ = run_decoder(llm, llm_params, batch, inlets)
        entry = llm_params["entry"] if llm.tied else None
        sums = llm.exit(llm_params["exit"], x, batch, entry)
        return sums["loss_sum"], llm.logits(llm_params["exit"], x, entry)

    return jax.grad(objective, has_aux=True)(params)


def read_model(folder: Folder, model: MultimodalModel, device: jax.Device) -> dict[str, Params]:
    """All parameters of a model, by module, layers stacked, on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return {
        m: read_params(folder, m, module_structs(module, sharding=sharding))
        for m, module in model.modules.items()
    }


def logit_errors(ours: np.ndarray, reference: Reference) -> tuple[float, float]:
    """(largest difference, as a share of the reference's largest logit or of 1; that logit)."""
    wanted = np.concatenate(reference.logits)
    largest = float(np.abs(wanted).max())
    return float(np.abs(ours - wanted).max()) / max(1.0, largest), largest


def gradient_errors(
    map_: WeightMap, ours: Mapping[str, Params], reference: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """By group of tensors ("llm.layers") the largest difference to the reference's gradient, as a
    share of the largest entry of its tensor. ValueError: the reference lacks one."""
    wanted = {map_.canonical(name): a for name, a in reference.items()}
    errors: dict[str, float] = {}
    largest = max(float(np.abs(a).max()) for a in wanted.values())
    for t in map_.tensors:
        if t.name not in wanted:
            raise ValueError(f"transformers has no parameter {t.name!r}; take version 5")
        leaf = reduce(getitem, t.path, ours[t.module][t.part])
        gradient = to_file_layout(t, leaf, t.layer, np.dtype(np.float32))
        reference_t = wanted[t.name]
        if gradient.shape != reference_t.shape:  # one of several parameters that are one tensor
            reference_t = reference_t[t.offset : t.offset + len(gradient)]
        group = f"{t.module}.{t.part}"
        # An error that is no number stays one.
        error = _relative_error(gradient, reference_t, largest)
        errors[group] = float(np.maximum(errors.get(group, 0.0), error))
    return errors


def rounding_errors(single: Reference, double: Reference) -> tuple[float, float]:
    """How far a reference in float32 is from it in float64: the (logit, gradient) errors."""
    logit, _ = logit_errors(np.concatenate(single.logits), double)
    largest = max(float(np.abs(a).max()) for a in double.gradients.values())
    errors = [_relative_error(single.gradients[n], a, largest) for n, a in double.gradients.items()]
    return logit, max(errors)


def _relative_error(gradient: np.ndarray, wanted: np.ndarray, largest: float) -> float:
    """The largest difference as a share of the largest entry of a tensor."""
    scale = max(float(np.abs(wanted).max()), MIN_SCALE * largest)
    return float(np.abs(gradient - wanted).max()) / scale
