"""The devices that answer, and how parameters and rows are laid out on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Module, MultimodalModel, Params, split_dim, stacked_parts
from dflop_jax.runtime.module_parts import logical_axes, module_structs

DATA, MODEL = "data", "model"
# Share of a device's memory that parameters may take where the tensor-parallel degree is not
# requested; the rest is for caches and activations.
PARAMS_SHARE = 0.7


def answer_mesh(devices: Sequence[jax.Device], tp: int, max_ranks: int) -> Mesh:
    """The mesh of axes "data" and "model" that answers: every data rank has its own prompts, and
    its `tp` devices share one copy of the parameters.

    Args:
      devices: of this process.
      max_ranks: upper bound on data ranks, since more have no prompt.

    Raises:
      ValueError: `tp` does not divide the devices.
    """
    if tp < 1 or len(devices) % tp:
        raise ValueError(
            f"--tp {tp}: does not divide this process's {len(devices)} devices; give a number that "
            "does, or 0"
        )
    ranks = min(len(devices) // tp, max_ranks)
    return Mesh(np.array(devices[: ranks * tp]).reshape(ranks, tp), (DATA, MODEL))


def min_tp(model: MultimodalModel, devices: Sequence[jax.Device]) -> int:
    """The lowest tensor-parallel degree at which the parameters fit the devices; 1 where a device
    does not say how much memory it has (CPU)."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    if not limit:
        return 1
    structs = [module_structs(m) for m in model.modules.values()]
    needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(structs))
    divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    return next((n for n in divisors if needed <= n * PARAMS_SHARE * limit), len(devices))


def param_structs(module: Module, mesh: Mesh) -> Params:
    """Shapes, compute dtypes and shardings of a module's parameters, layers stacked."""
    tp = int(mesh.shape[MODEL])

    def shard_struct(
        lead: int, a: jax.ShapeDtypeStruct, axes: tuple[Any, ...]
    ) -> jax.ShapeDtypeStruct:
        spec = P(*[None] * lead, *spec_of(a.shape[lead:], axes, tp))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    return {
        part: jax.tree.map(
            partial(shard_struct, int(part in stacked_parts(module))),
            structs,
            logical_axes(module, part),
        )
        for part, structs in module_structs(module).items()
    }


def spec_of(shape: Sequence[int], axes: Sequence[str | None], tp: int) -> tuple[str | None, ...]:
    """How an array is split over the devices of a rank; whole where they do not divide it."""
    dim = split_dim(shape, axes, tp)
    if dim is not None and shape[dim] % tp:
        dim = None
    return tuple(MODEL if i == dim else None for i in range(len(axes)))
