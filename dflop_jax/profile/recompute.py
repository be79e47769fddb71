"""What recompute policies cost: predicted from the module's own functions, or measured in part.

What a policy computes again is in the trace of its backward. Of programs that were timed only the
gradient and forward are known; a policy then takes the share of forward that the roofline says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflop_jax.contract import Module, MultimodalModel, edges_of
from dflop_jax.hardware import Hardware
from dflop_jax.profile.efficiency import Efficiency, Table
from dflop_jax.profile.kernels import ATTENTION
from dflop_jax.profile.memory import kept_bytes, temporaries
from dflop_jax.profile.parts import Names, end_names, has_loss, part_kernels
from dflop_jax.records import BACKWARD, FORWARD, Direction, LayerTiming, Recompute, Remat, Shape

POLICIES: tuple[Remat, ...] = ("none", "dots", "named", "layers")
# What is kept goes into a stack of all layers and out of it. About half of it is copied for that
# (results and operands of products), the rest is read and written where it is computed.
_STACK_PASSES = 2


@dataclass(frozen=True)
class Predictor:
    """Seconds and bytes of one module at one tensor-parallel degree, by the roofline; edges fill
    the fields `placed` of its entry."""

    module: Module
    placed: Names
    ways: int
    hardware: Hardware
    efficiency: Efficiency
    half_bytes: int = 2

    def part_s(self, part: str, direction: Direction, shape: Shape, remat: Remat = "none") -> float:
        """Seconds of one part, of a layer for "layers"."""
        placed = self.placed if part == "entry" else ()
        kernels = part_kernels(self.module, part, direction, shape, self.ways, placed, remat)
        table = Table.of([kernels], [self.ways], self.hardware)
        return float(table.seconds(self.efficiency)[0])

    def ends_s(self, direction: Direction, shape: Shape, remat: Remat = "none") -> float:
        """Seconds of entry, exit and taps."""
        return sum(self.part_s(p, direction, shape, remat) for p in end_names(self.module))

    def recompute(self, shape: Shape, pair_s: float) -> dict[Remat, Recompute]:
        """Every policy's cost at a shape; `pair_s` is forward's for a pair of tokens."""
        return {r: self._recompute(shape, r, pair_s) for r in POLICIES}

    def _recompute(self, shape: Shape, remat: Remat, pair_s: float) -> Recompute:
        loss = has_loss(self.module, shape)
        # A loss has its gradient where it is computed.
        ends = [p for p in end_names(self.module) if not (loss and p == "exit")]
        ends_s = sum(self._again_s(p, shape, remat) for p in ends)
        layer_s = self._again_s("layers", shape, remat)
        layer_bytes, ends_bytes = kept_bytes(
            self.module, shape, self.ways, remat,
            placed=self.placed, half_bytes=self.half_bytes, loss=loss,
        )  # fmt: skip
        reached = self.hardware.memory_bandwidth * self.efficiency.bandwidth
        return Recompute(
            layer_s=layer_s + _STACK_PASSES * layer_bytes / reached,
            ends_s=ends_s,
            pair_s=self._attention_again(shape, remat) * pair_s,
            layer_bytes=layer_bytes,
            ends_bytes=ends_bytes,
            temp_bytes=temporaries(
                self.module, shape, self.ways, remat,
                placed=self.placed, half_bytes=self.half_bytes, loss=loss,
            ),
        )  # fmt: skip

    def _again_s(self, part: str, shape: Shape, remat: Remat) -> float:
        """Seconds of a part's forward that backward computes again."""
        without_s = self.part_s(part, BACKWARD, shape)
        return max(0.0, self.part_s(part, BACKWARD, shape, remat) - without_s)

    def _attention_again(self, shape: Shape, remat: Remat) -> float:
        """Share of forward's attention that backward computes again."""

        def products(direction: Direction, remat: Remat = "none") -> int:
            kernels = part_kernels(self.module, "layers", direction, shape, self.ways, (), remat)
            return sum(k.repeats for k in kernels if k.kind == ATTENTION)

        again = products(BACKWARD, remat) - products(BACKWARD)
        return min(1.0, max(0.0, again / max(products(FORWARD), 1)))

    def beside(self, timing: LayerTiming, temp_bytes: float) -> dict[Remat, Recompute]:
        """Every policy's cost beside a timing of programs that recompute nothing and have so many
        bytes of temporaries: of forward's seconds the share that it computes again here."""
        shape = timing.shape
        layer_s, ends_s = self.part_s("layers", FORWARD, shape), self.ends_s(FORWARD, shape)
        traced = self.recompute(shape, timing.pair_forward_s)
        found = {}
        for remat, cost in traced.items():
            again = min(1.0, self._again_s("layers", shape, remat) / layer_s)
            ends_again = min(1.0, cost.ends_s / ends_s) if ends_s else 0.0
            more_bytes = max(0.0, cost.temp_bytes - traced["none"].temp_bytes)
            found[remat] = replace(
                cost,
                layer_s=again * timing.layer_forward_s,
                ends_s=ends_again * timing.ends_forward_s,
                temp_bytes=temp_bytes + more_bytes,
            )
        return found


def entry_fields(model: MultimodalModel, module: str) -> Names:
    """Fields of a module's entry that edges fill."""
    into = (e for e in edges_of(model) if e.target == module and e.enters < 0)
    return tuple(dict.fromkeys(e.name for e in into))
