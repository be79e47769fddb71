"""Errors of our logits and gradients to those of transformers, on the same samples."""

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

TOKEN_MULTIPLE = 8  # rows are padded to a multiple of these tokens
# Errors are relative to the largest entry of a tensor, or to this fraction of the largest of all
# tensors if that is more: a gradient that is 0 in theory (of a key's bias) is rounding noise.
MIN_SCALE = 1e-3
# No optimization, since programs compile for seconds and run for milliseconds.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COPIES = 3  # of the parameters at the peak: our gradients, transformers' parameters and gradients


def describe_memory_shortage(folder: Folder, *, double: bool = False) -> str:
    """Return why memory is too small to run both sides, with `double` transformers also in float64;
    "" if it suffices or is unknown."""
    n = sum(int(np.prod(t.layout.file_shape)) for t in folder.map.tensors)
    needed = COPIES * (1 + double) * np.dtype(np.float32).itemsize * n
    free = available_host_bytes()
    if free is None or needed <= free:
        return ""
    return f"it takes {needed / GB:.0f} GB of memory, {free / GB:.0f} GB are free"


def run_model(
    model: MultimodalModel, params: dict[str, Params], samples: Sequence[MixedSample]
) -> tuple[np.ndarray, dict[str, Params]]:
    """Run the samples packed in one row, on the CPU, with `params` there. Return their logits,
    float32 [tokens, vocab], one sample after the other, and the gradient of the sum of their losses
    as a tree like `params`."""
    row = pack_row([s.sample for s in samples], model, TOKEN_MULTIPLE)
    chip = chip_of(jax.local_devices(backend="cpu")[0])
    run = jax.jit(partial(_loss, model, chip), compiler_options=COMPILER_OPTIONS)
    gradients, logits = run(params, row)
    return np.asarray(logits[0, : int(row.lengths[0])]), gradients


def _loss(
    model: MultimodalModel, chip: str, params: dict[str, Params], row: AnswerRows
) -> tuple[dict[str, Params], Array]:
    """Return the gradients of a row's loss, and its logits."""
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
    """Read all parameters of a model to a device, by module, with layers stacked."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return {
        m: read_params(folder, m, module_structs(module, sharding=sharding))
        for m, module in model.modules.items()
    }


def logit_errors(ours: np.ndarray, reference: Reference) -> tuple[float, float]:
    """Return (largest error over the reference's largest logit or 1 if smaller, that logit)."""
    wanted = np.concatenate(reference.logits)
    largest = float(np.abs(wanted).max())
    return float(np.abs(ours - wanted).max()) / max(1.0, largest), largest


def gradient_errors(
    map_: WeightMap, ours: Mapping[str, Params], reference: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return the largest error of gradients to the reference by group of tensors ("llm.layers"),
    relative to the largest entry of the tensor. ValueError if the reference has no such tensor."""
    wanted = {map_.canonical(name): a for name, a in reference.items()}
    errors: dict[str, float] = {}
    largest = max(float(np.abs(a).max()) for a in wanted.values())
    for t in map_.tensors:
        if t.name not in wanted:
            raise ValueError(f"transformers has no parameter {t.name!r}; take version 5")
        leaf = reduce(getitem, t.path, ours[t.module][t.part])
        gradient = to_file_layout(t, leaf, t.layer, np.dtype(np.float32))
        reference_t = wanted[t.name]
        if gradient.shape != reference_t.shape:  # a part of a fused tensor
            reference_t = reference_t[t.offset : t.offset + len(gradient)]
        group = f"{t.module}.{t.part}"
        # np.maximum keeps NaN.
        error = _relative_error(gradient, reference_t, largest)
        errors[group] = float(np.maximum(errors.get(group, 0.0), error))
    return errors


def rounding_errors(single: Reference, double: Reference) -> tuple[float, float]:
    """Return the (logit, gradient) errors of a float32 reference to the float64 one."""
    logit, _ = logit_errors(np.concatenate(single.logits), double)
    largest = max(float(np.abs(a).max()) for a in double.gradients.values())
    errors = [_relative_error(single.gradients[n], a, largest) for n, a in double.gradients.items()]
    return logit, max(errors)


def _relative_error(gradient: np.ndarray, wanted: np.ndarray, largest: float) -> float:
    """Return the largest error relative to the largest entry of a tensor (see `MIN_SCALE`)."""
    scale = max(float(np.abs(wanted).max()), MIN_SCALE * largest)
    return float(np.abs(gradient - wanted).max()) / scale
