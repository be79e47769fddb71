"""A segment on its submesh: parameters, shardings and the programs compiled for each shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import (
    Array,
    Module,
    Params,
    split_dim,
    taps_of,
)
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.pieces import ADAPTER, STACKED
from dflop_jax.records import BACKWARD, FORWARD, Direction, Edge, SegmentPlan, Shape

Tree = Any
# Programs of a segment: "evaluate" is a forward that also gives the loss's sums.
Kind = Direction | Literal["evaluate"]
EVALUATE: Literal["evaluate"] = "evaluate"
AXES = ("stage", "data", "model")
KEY_IMPL = "rbg"  # of the keys of fresh parameters: compiles several times faster than threefry


@dataclass(frozen=True)
class Segment:
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

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    # ---- parameters ----

    def param_structs(self) -> Params:
        """Shapes and dtypes of the segment's parameters, layers stacked."""

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.plan.n_layers, *leaf.shape), leaf.dtype)

        structs = {p: self._part_struct(p) for p in self.parts}
        return {p: jax.tree.map(stacked, s) if p in STACKED else s for p, s in structs.items()}

    def program_structs(self) -> Params:
        """`param_structs` with their shardings: what programs read."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding(*s)),
            self.param_structs(),
            self.param_specs(),
        )

    def placed_structs(self) -> Params:
        """`program_structs` of the segment's own parts: what it updates and saves."""
        structs = self.program_structs()
        return {part: structs[part] for part in self.own_parts}

    def _part_struct(self, part: str) -> Params:
        return _part_struct(self.module, part)

    def _specs(self, lead_layers: tuple[Any, ...], lead_ends: tuple[Any, ...]) -> Params:
        ways = self.mesh.shape["model"]

        def spec(lead: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, axes: tuple[Any, ...]) -> P:
            split = split_dim(leaf.shape, axes, ways)
            return P(*lead, *("model" if i == split else None for i in range(len(axes))))

        return {
            part: jax.tree.map(
                partial(spec, lead_layers if part in STACKED else lead_ends),
                self._part_struct(part),
                _logical_axes(self.module, part),
            )
            for part in self.parts
        }

    def param_specs(self) -> Params:
        specs = self._specs(("stage",), ())
        jax.tree.map_with_path(self._check_divides, self.param_structs(), specs)
        return specs

    def _check_divides(self, path: Any, leaf: jax.ShapeDtypeStruct, spec: P) -> None:
        for size, axis in zip(leaf.shape, spec, strict=False):
            ways = self.mesh.shape[axis] if axis else 1
            if size % ways:
                raise ValueError(
                    f"segment {self.name!r}: dim {size} of {jax.tree_util.keystr(path)} does not "
                    f"divide over {axis}={ways}; choose a degree that divides it"
                )

    def grad_specs(self) -> Params:
        specs = self._specs(("data", "stage"), (("data", "stage"),))
        return {part: specs[part] for part in self.parts if part in self.trainable}

    def grad_structs(self) -> Params:
        """Float32 accumulators: a leading dim keeps the ranks' gradients apart."""

        def accumulator(lead: int, leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            shape = (lead, *leaf.shape)
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.sharding(*spec))

        structs, ranks = self.param_structs(), self.data_ranks
        return {
            part: jax.tree.map(
                partial(accumulator, ranks if part in STACKED else ranks * self.stages),
                structs[part],
                specs,
            )
            for part, specs in self.grad_specs().items()
        }

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


@partial(jax.jit, static_argnums=(0, 1))
def init_part(module: Module, part: str, key: Array) -> Params:
    """Fresh parameters of a part of a module, of one layer for "layers"."""
    return module.init(part, key)


def init_structs(module: Module, part: str) -> Params:
    """Shapes and dtypes of `init_part`, which then is not traced again where it runs."""
    return init_part.eval_shape(module, part, jax.random.key(0, impl=KEY_IMPL))


# What follows is asked for again and again, for every segment, shape and program.


@lru_cache(maxsize=256)
def _part_struct(module: Module, part: str) -> Params:
    return init_structs(module, part)


@lru_cache(maxsize=256)
def _logical_axes(module: Module, part: str) -> Params:
    return module.logical_axes(part)


def _fields(module: Module, part: str, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    names = module.inputs.get(part, ())
    return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}


@lru_cache(maxsize=1024)
def _hidden_struct(module: Module, shape: Shape) -> jax.ShapeDtypeStruct:
    fields = _fields(module, "entry", shape)
    return jax.eval_shape(module.entry, _part_struct(module, "entry"), fields)


@lru_cache(maxsize=1024)
def _tap_struct(module: Module, name: str, shape: Shape) -> jax.ShapeDtypeStruct:
    fields = {k: struct for part in ("entry", "layers", name)
              for k, struct in _fields(module, part, shape).items()}  # fmt: skip
    params = _part_struct(module, name) if name in module.inputs else None
    tap: Any = module.tap  # type: ignore[attr-defined]
    return jax.eval_shape(partial(tap, name), params, _hidden_struct(module, shape), fields)


@lru_cache(maxsize=1024)
def _exit_struct(module: Module, shape: Shape) -> Tree:
    fields, hidden = _fields(module, "exit", shape), _hidden_struct(module, shape)
    entry = _part_struct(module, "entry") if module.tied else None
    return jax.eval_shape(module.exit, _part_struct(module, "exit"), hidden, fields, entry)


def parts_of(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """Parts of its module that a segment holds."""
    here = {"entry": s.first, "layers": True, "exit": s.last}
    for name, layers in taps_of(module).items():
        here[name] = name in module.inputs and s.runs_to(layers)
    here[ADAPTER] = ADAPTER in module.freeze_groups
    return tuple(part for part, is_here in here.items() if is_here)
