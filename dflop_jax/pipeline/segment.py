"""A segment on its submesh: parameters, shardings and the programs compiled for each shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflop_jax.contract import Module, chip_of, taps_of
from dflop_jax.pipeline.held import HeldParameters, part_struct
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.pieces import ADAPTER
from dflop_jax.records import BACKWARD, FORWARD, Direction, Edge, SegmentPlan, Shape

Tree = Any
# Programs of a segment: "evaluate" is a forward that also gives the loss's sums.
Kind = Direction | Literal["evaluate"]
EVALUATE: Literal["evaluate"] = "evaluate"


def unrolled_layers(chip: str) -> int:
    """Most layers of a stage that are unrolled: on GPUs as many as compile in a minute or so. On a
    CPU, where copies cost little beside products, none."""
    return 8 if chip.startswith("sm_") else 0


@dataclass(frozen=True)
class Segment(HeldParameters):
    """A segment's static facts; everything below is derived from them.

    Attributes:
      edges: of the model, those that leave from this segment or enter it.
      trainable: parts of its own, and the shared one, that get gradients.
      wants_gradient: names of its inputs that get one, because what they come from trains.
      shares_entry: whether it reads the entry's parameters of its module, which another segment
        owns (a tied head).
    """

    plan: SegmentPlan
    module: Module
    mesh: Mesh
    microbatches: int
    trainable: frozenset[str]
    wants_gradient: frozenset[str] = frozenset()
    edges: tuple[Edge, ...] = ()
    shares_entry: bool = False

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def own_parts(self) -> tuple[str, ...]:
        """Parts that it updates and saves."""
        return parts_of(self.plan, self.module)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts that its programs read: its own, and the entry where that is shared."""
        return (*self.own_parts, *(("entry",) if self.shares_entry else ()))

    @property
    def stages(self) -> int:
        return self.mesh.shape["stage"]

    @property
    def data_ranks(self) -> int:
        return self.mesh.shape["data"]

    @cached_property
    def outgoing(self) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if self.plan.sends(e))

    @cached_property
    def entry_inputs(self) -> tuple[str, ...]:
        """Names of the edges that the entry reads."""
        here = (e.name for e in self.edges if e.enters < 0 and self.plan.reads(e))
        return tuple(dict.fromkeys(here))

    @cached_property
    def inlets(self) -> tuple[tuple[str, int], ...]:
        """(name, layers of the segment that have run) of the edges that enter between layers."""
        here = (e for e in self.edges if e.enters >= 0 and self.plan.reads(e))
        return tuple(dict.fromkeys((e.name, e.enters - self.plan.start) for e in here))

    @cached_property
    def taps(self) -> tuple[tuple[str, int], ...]:
        """(name, layers of the segment that have run) of the taps that edges leave from."""
        here = (e for e in self.outgoing if e.tap)
        return tuple(dict.fromkeys((e.tap, e.leaves - self.plan.start) for e in here))

    @property
    def splits_tensors(self) -> bool:
        return self.mesh.shape["model"] > 1

    @property
    def unrolls(self) -> bool:
        """Whether programs with a gradient have the layers of a stage one by one. A loop compiles
        in the time of one layer, but copies what it keeps of each into stacks and out of them."""
        if self.plan.zero == 3:  # gathered one ahead by a loop of their own
            return False
        chip = chip_of(self.mesh.devices.flat[0])
        return self.plan.n_layers // self.stages <= unrolled_layers(chip)

    @property
    def has_loss(self) -> bool:
        """Whether it ends in a loss."""
        return bool(self.loss_sums)

    @property
    def hands_over(self) -> bool:
        """Whether its forward task keeps residuals for the backward task: it has both, and does
        not recompute everything."""
        is_read = not self.plan.last or bool(self.outgoing)
        runs_back = bool(self.trainable or self.wants_gradient)
        return is_read and runs_back and self.plan.remat != "segment"

    @cached_property
    def loss_sums(self) -> tuple[str, ...]:
        """Names of its loss's sums; () without a loss. Any shape tells."""
        out = _exit_struct(self.module, Shape(1, 128)) if self.plan.last else None
        return tuple(out) if isinstance(out, dict) else ()

    # ---- shapes of what flows ----

    def field_names(self) -> tuple[str, ...]:
        """Fields that come from the packer; what edges bring is not among them."""
        edges = {e.name for e in self.edges if e.target == self.plan.module}
        names = [n for part in self.own_parts for n in self.module.inputs[part]]
        return tuple(dict.fromkeys(n for n in names if n not in edges))

    def _global(self, struct: jax.ShapeDtypeStruct, *spec: Any) -> jax.ShapeDtypeStruct:
        rows, *rest = struct.shape
        shape = (self.microbatches, self.data_ranks * rows, *rest)
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=self.sharding(*spec))

    def field_structs(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            n: self._global(self.module.field_spec(n, shape.rows, shape.tokens), None, "data")
            for n in self.field_names()
        }

    def hidden_struct(self, shape: Shape) -> jax.ShapeDtypeStruct:
        """Hidden states between layers, on one data rank."""
        return _hidden_struct(self.module, shape)

    def x_structs(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        """What the segment receives: "hidden" from the one before it, and what edges bring."""
        hidden = {} if self.plan.first else {"hidden": self.hidden_struct(shape)}
        placed = {
            name: self.module.field_spec(name, shape.rows, shape.tokens)
            for name in (*self.entry_inputs, *(name for name, _ in self.inlets))
        }
        every = {**hidden, **placed}
        return {name: self._global(struct, None, "data") for name, struct in every.items()}

    def y_structs(self, shape: Shape, *, sums: bool = False) -> dict[str, Tree]:
        """What the segment gives: "next", "exit", "taps", and its loss's "sums" if wanted."""
        hidden = self.hidden_struct(shape)
        y: dict[str, Tree] = {}
        if self.taps:
            y["taps"] = {
                name: self._global(_tap_struct(self.module, name, shape), "stage", "data")
                for name, _ in self.taps
            }
        if not self.plan.last:
            # As the next segment takes it, so that the transfer is a copy of equal pieces.
            return {**y, "next": self._global(hidden, None, "data")}
        if not self.has_loss:
            return {**y, "exit": self._global(_exit_struct(self.module, shape), "stage", "data")}
        if not sums:
            return y
        each = jax.ShapeDtypeStruct(
            (self.microbatches, self.data_ranks),
            jnp.float32,
            sharding=self.sharding("stage", "data"),
        )
        return {**y, "sums": dict.fromkeys(self.loss_sums, each)}

    def output_struct(self, edge: Edge, shape: Shape) -> jax.ShapeDtypeStruct:
        """What an edge takes from the segment: features of its exit, or of a tap."""
        y = self.y_structs(shape)
        return y["taps"][edge.tap] if edge.tap else y["exit"]

    # ---- programs ----

    def argument_structs(self, shape: Shape, kind: Kind) -> tuple[Tree, ...]:
        """forward, evaluate: (params, x, fields); backward: (params, x, fields, dy, grads,
        residuals)."""
        args = (self.program_structs(), self.x_structs(shape), self.field_structs(shape))
        if kind != BACKWARD:
            return args
        dy = self.y_structs(shape)
        if self.has_loss:
            dy["sums"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.sharding())
        return (*args, dy, self.grad_structs(), self.residual_structs(shape))

    def output_structs(self, shape: Shape, kind: Kind) -> Tree:
        """forward: y and, if it hands any over, "residuals"; evaluate: y with the loss's sums;
        backward: (sums, dx, grads, done)."""
        if kind != BACKWARD:
            y = self.y_structs(shape, sums=kind == EVALUATE)
            handed = self.hands_over and kind == FORWARD
            return {**y, "residuals": self.residual_structs(shape)} if handed else y
        ranks = (self.stages, self.data_ranks)
        done = jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=self.sharding("stage", "data"))
        dx = {n: s for n, s in self.x_structs(shape).items() if n in self.wants_gradient}
        sums = self.y_structs(shape, sums=True).get("sums", {})
        return (sums, dx, self.grad_structs(), done)

    def residual_structs(self, shape: Shape) -> Tree:
        """What forward hands over to backward: see `Lowering`; {} if nothing."""
        return self._lowering.residual_structs(shape) if self.hands_over else {}

    def learn_residuals(self, shape: Shape, forward: jax.stages.Compiled) -> None:
        """Take the shardings of what forward hands over from its compiled program."""
        self._lowering.learn_residuals(shape, forward)

    def lower(self, shape: Shape, kind: Kind) -> jax.stages.Lowered:
        """Program of a kind at a per-rank shape, ready to be compiled; it maps `argument_structs`
        to `output_structs`, and backward donates the gradients."""
        return self._lowering.lower(shape, kind)

    @cached_property
    def _lowering(self) -> Lowering:
        return Lowering(self)


# What follows is asked for again and again, for every segment, shape and program.


def _fields(module: Module, part: str, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    names = module.inputs.get(part, ())
    return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}


@lru_cache(maxsize=1024)
def _hidden_struct(module: Module, shape: Shape) -> jax.ShapeDtypeStruct:
    fields = _fields(module, "entry", shape)
    return jax.eval_shape(module.entry, part_struct(module, "entry"), fields)


@lru_cache(maxsize=1024)
def _tap_struct(module: Module, name: str, shape: Shape) -> jax.ShapeDtypeStruct:
    fields = {k: struct for part in ("entry", "layers", name)
              for k, struct in _fields(module, part, shape).items()}  # fmt: skip
    params = part_struct(module, name) if name in module.inputs else None
    tap: Any = module.tap  # type: ignore[attr-defined]
    return jax.eval_shape(partial(tap, name), params, _hidden_struct(module, shape), fields)


@lru_cache(maxsize=1024)
def _exit_struct(module: Module, shape: Shape) -> Tree:
    fields, hidden = _fields(module, "exit", shape), _hidden_struct(module, shape)
    entry = part_struct(module, "entry") if module.tied else None
    return jax.eval_shape(module.exit, part_struct(module, "exit"), hidden, fields, entry)


def parts_of(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """Parts of its module that a segment holds."""
    here = {"entry": s.first, "layers": True, "exit": s.last}
    for name, layers in taps_of(module).items():
        here[name] = name in module.inputs and s.runs_to(layers)
    here[ADAPTER] = ADAPTER in module.freeze_groups
    return tuple(part for part, is_here in here.items() if is_here)
