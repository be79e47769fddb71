"""Bytes of what forward hands to backward and of a backward program's temporaries, traced and
counted: nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dflop_jax.contract import Module
from dflop_jax.profile.fit import DEPTHS
from dflop_jax.profile.one_kind import kinds_apart
from dflop_jax.profile.parts import Names, end_names, part_kept, part_names, part_work
from dflop_jax.records import BACKWARD, Remat, Shape


def kept_bytes(
    module: Module,
    shape: Shape,
    ways: int,
    remat: Remat = "none",
    *,
    placed: Names = (),
    half_bytes: int = 2,
    loss: bool = False,
) -> tuple[float, float]:
    """Bytes on one device that a microbatch's forward keeps for backward: (of a layer, of both
    ends).

    Args:
      ways: tensor-parallel degree.
      placed: fields of the entry that edges fill.
      half_bytes: what an element of a half-precision activation takes: 2 on accelerators, 4 in
        programs of XLA's CPU compiler.
      loss: whether the exit gives a loss, whose gradient is computed at once.
    """
    of_part = partial(part_kept, module, shape=shape, ways=ways, half_bytes=half_bytes, remat=remat)
    ends = [p for p in end_names(module) if not (loss and p == "exit")]
    both = sum(of_part(p, placed=placed if p == "entry" else ()) for p in ends)
    return of_part("layers"), both


def temporaries(
    module: Module,
    shape: Shape,
    ways: int,
    remat: Remat = "none",
    *,
    placed: Names = (),
    parts: Sequence[str] | None = None,
    half_bytes: int = 2,
    loss: bool = False,
) -> float:
    """Bytes on one device that a backward program has beside its arguments and what forward kept,
    however many layers it has: what is alive at once in the largest of its parts (None: all)."""

    def alive(part: str) -> float:
        at_once: Remat = "layers" if loss and part == "exit" else remat
        fields = placed if part == "entry" else ()
        return part_work(module, part, BACKWARD, shape, ways, half_bytes, fields, at_once)

    return max(map(alive, part_names(module) if parts is None else parts))


def probe_bytes(module: Module, shape: Shape, half_bytes: int = 4) -> float:
    """Bytes of activations of the largest program that times a shape on one device, parameters
    aside; `half_bytes` as for `kept_bytes`."""

    def of_kind(apart: Module) -> float:
        layer, ends = kept_bytes(apart, shape, 1, half_bytes=half_bytes)
        return max(DEPTHS) * layer + ends + temporaries(apart, shape, 1, half_bytes=half_bytes)

    return max(map(of_kind, kinds_apart(module).values()))
