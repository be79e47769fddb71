"""Seconds that a compiled program should take on a chip, by what takes them."""

from __future__ import annotations

from dflop_jax.gpu_compile.hlo_kernels import hlo_kernels
from dflop_jax.profile.efficiency import Efficiency, Table
from dflop_jax.records import Hardware


def modelled_terms(
    optimized: str, seen_pairs: float, hardware: Hardware, efficiency: Efficiency | None = None
) -> dict[str, float]:
    """Seconds by term ("products", "attention", "elementwise", "copies", "collectives",
    "launches") under the roofline. Nothing runs beside anything else: their sum is the program's.

    Args:
      optimized: what `compiled.as_text()` shows.
      seen_pairs: see `dflop_jax.gpu_compile.hlo_cost.hlo_cost`.
      efficiency: what kernels reach; by default what plans assume.
    """
    table = Table.of([hlo_kernels(optimized, seen_pairs)], [1], hardware)
    terms = table.terms(efficiency or Efficiency())
    return {name: float(seconds[0]) for name, seconds in terms.items()}
