"""Devices that answer together, and how what they hold is laid out on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Module, MultimodalModel, Params, n_rows, split_dim, stacked_parts
from dflop_jax.pipeline.parts import logical_axes, part_struct

DATA, MODEL = "data", "model"
# Of a device's memory, what parameters may take where it is not said over how many devices they are
# split: the rest is for caches and activations.
PARAMS_SHARE = 0.7


@dataclass(frozen=True)
class Replica:
    """Data ranks, each of some devices that share one copy of the parameters. Every replica of a
    run answers other prompts; the processes whose devices it has run it in step.

    Attributes:
      mesh: axes "data" and "model".
      number: of this one among the `count` of the run.
      leads: whether this process is the first of its processes, which speaks for it.
    """

    mesh: Mesh
    number: int = 0
    count: int = 1
    leads: bool = True

    @property
    def ranks(self) -> int:
        return int(self.mesh.shape[DATA])

    @property
    def device(self) -> jax.Device:
        """One of its devices."""
        return self.mesh.devices.flat[0]

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def put(self, a: np.ndarray, *spec: Any) -> jax.Array:
        """An array that every process has whole, as its devices hold it."""
        return jax.make_array_from_callback(a.shape, self.sharding(*spec), lambda at: a[at])


def replica_of(
    devices: Sequence[jax.Device], ways: int, process: int = 0, most_ranks: int = 0
) -> Replica:
    """The replica of a process: its own devices, or where `ways` of them are more, those of some
    neighbouring processes.

    Args:
      devices: of the run, process by process, as many on each.
      ways: devices that share one copy of the parameters.
      most_ranks: data ranks that have work at most; 0: any number.

    Raises:
      ValueError: `ways` fits neither the devices of a process nor the processes.
    """
    each = sum(d.process_index == devices[0].process_index for d in devices)
    size = each if ways <= each else ways
    if size % ways or size % each or len(devices) % size:
        raise ValueError(
            f"--ways {ways}: parameters are split over devices of one process ({each}) or of whole "
            f"processes ({len(devices)} in all); give a number that divides the former or the "
            "latter and is a multiple of the former"
        )
    number = process * each // size
    own = devices[number * size : (number + 1) * size]
    ranks = size // ways
    ranks = min(ranks, most_ranks) if most_ranks else ranks
    mesh = Mesh(np.array(own[: ranks * ways]).reshape(ranks, ways), (DATA, MODEL))
    return Replica(mesh, number, len(devices) // size, process * each % size == 0)


def least_ways(
    model: MultimodalModel, devices: Sequence[jax.Device], used_bytes: float = 0.0
) -> int:
    """Over how many devices the parameters have to be split so that these hold them beside what
    they have in use; 1 where no device says what it has (CPU)."""
    local = next((d for d in devices if d.process_index == jax.process_index()), None)
    limit = ((local.memory_stats() if local else None) or {}).get("bytes_limit", 0)
    if not limit:
        return 1
    structs = [param_shapes(m) for m in model.modules.values()]
    needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(structs))
    room = PARAMS_SHARE * (limit - used_bytes)
    divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    return next((n for n in divisors if needed <= n * room), len(devices))


def param_structs(module: Module, replica: Replica) -> Params:
    """Shapes, working dtypes and shardings of a module's parameters, layers stacked."""
    ways = int(replica.mesh.shape[MODEL])

    def placed(lead: int, a: jax.ShapeDtypeStruct, axes: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
        spec = spec_of(a.shape[lead:], axes, ways)
        return jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=replica.sharding(*[None] * lead, *spec)
        )

    return {
        part: jax.tree.map(
            partial(placed, int(part in stacked_parts(module))), structs, logical_axes(module, part)
        )
        for part, structs in param_shapes(module).items()
    }


def spec_of(shape: Sequence[int], axes: Sequence[str | None], ways: int) -> tuple[str | None, ...]:
    """How an array is split over the devices of a rank; whole where they do not divide it."""
    dim = split_dim(shape, axes, ways)
    if dim is not None and shape[dim] % ways:
        dim = None
    return tuple(MODEL if i == dim else None for i in range(len(axes)))


def param_shapes(module: Module) -> Params:
    """Shapes and working dtypes by part, layers stacked."""
    lead = {part: (n_rows(module, part),) for part in stacked_parts(module)}

    def stacked(part: str, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead.get(part, ()), *a.shape), a.dtype)

    return {p: jax.tree.map(partial(stacked, p), part_struct(module, p)) for p in module.inputs}
