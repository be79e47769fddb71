"""A segment on its submesh: parameters, shardings and the programs compiled for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import MODEL_SHARDED, Array, Module, MultimodalModel, Params
from dflop_jax.pipeline import spmd_loop
from dflop_jax.pipeline.communicator import place
from dflop_jax.pipeline.order import upstream, with_backward
from dflop_jax.pipeline.spmd_loop import ADAPTER, PARTS, STACKED
from dflop_jax.records import BACKWARD, FORWARD, ModuleShape, Plan, SegmentPlan

Tree = Any
AXES = ("stage", "data", "model")


def make_mesh(plan: Plan, name: str, devices: list[jax.Device]) -> Mesh:
    """The named submesh over its devices; ValueError when there are too few."""
    m = plan.submesh(name)
    if m.devices.stop > len(devices):
        raise ValueError(
            f"submesh {name!r} needs devices {m.first}..{m.devices.stop - 1} but only "
            f"{len(devices)} exist; lower plan.devices or start with more devices"
        )
    block = devices[m.first : m.devices.stop]
    if not can_join(block):
        raise ValueError(
            f"submesh {name!r} spans processes with several CPU devices each, whose collectives "
            "wait for each other; start one process per device (dflop launch -n N)"
        )
    return Mesh(np.array(block).reshape(m.shape), AXES)


def can_join(devices: Sequence[jax.Device]) -> bool:
    """Whether devices can form a submesh: CPU devices of several processes must be one of each."""
    processes = [d.process_index for d in devices]
    return devices[0].platform != "cpu" or len(set(processes)) in (1, len(processes))


@dataclass(frozen=True)
class Segment:
    """A segment's static facts; everything below is derived from them."""

    plan: SegmentPlan
    module: Module
    mesh: Mesh
    microbatches: int
    trainable: frozenset[str]
    sends_gradient: bool
    encoders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.module.tied and self.plan.last and not self.plan.first:
            raise ValueError(
                f"{self.plan.module!r} ties its head to its embedding, so both must lie in one "
                "segment; use a stage axis instead of several segments, or untie the head"
            )

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def parts(self) -> tuple[str, ...]:
        return parts_of(self.plan, self.module)

    @property
    def stages(self) -> int:
        return self.mesh.shape["stage"]

    @property
    def data_ranks(self) -> int:
        return self.mesh.shape["data"]

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    # ---- parameters ----

    def init(self, key: Array) -> Params:
        """Initial parameters on the submesh; layer i of a module has the same in any plan."""
        specs, out = self.param_specs(), {}
        for part in self.parts:
            # Keys depend on the part's place in the model, never on the plan.
            part_key = jax.random.fold_in(key, (*PARTS, ADAPTER).index(part))
            if part in STACKED:
                keys = jax.random.split(part_key, self.module.n_layers)
                each = [
                    jax.tree.map(np.asarray, _init(self.module, part, keys[i]))
                    for i in range(self.plan.start, self.plan.stop)
                ]
                tree = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
            else:
                tree = jax.tree.map(np.asarray, _init(self.module, part, part_key))
            out[part] = jax.tree.map(
                lambda a, spec: place(a, self.sharding(*spec)), tree, specs[part]
            )
        return out

    def param_structs(self) -> Params:
        """Shapes and dtypes of the segment's parameters, layers stacked."""

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.plan.n_layers, *leaf.shape), leaf.dtype)

        structs = {p: self._part_struct(p) for p in self.parts}
        return {p: jax.tree.map(stacked, s) if p in STACKED else s for p, s in structs.items()}

    def placed_structs(self) -> Params:
        """`param_structs` with their shardings."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding(*s)),
            self.param_structs(),
            self.param_specs(),
        )

    def _part_struct(self, part: str) -> Params:
        return jax.eval_shape(partial(self.module.init, part), jax.random.key(0))

    def _specs(self, lead_layers: tuple[Any, ...], lead_ends: tuple[Any, ...]) -> Params:
        def spec(lead: tuple[Any, ...], axes: tuple[str | None, ...]) -> P:
            return P(*lead, *("model" if a in MODEL_SHARDED else None for a in axes))

        return {
            part: jax.tree.map(
                partial(spec, lead_layers if part in STACKED else lead_ends),
                self.module.logical_axes(part),
                is_leaf=lambda a: isinstance(a, tuple),
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
        names = [n for part in self.parts for n in self.module.inputs[part]]
        return tuple(dict.fromkeys(n for n in names if n != "visual"))

    def _global(self, struct: jax.ShapeDtypeStruct, *spec: Any) -> jax.ShapeDtypeStruct:
        items, *rest = struct.shape
        shape = (self.microbatches, self.data_ranks * items, *rest)
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=self.sharding(*spec))

    def field_structs(self, shape: ModuleShape) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            n: self._global(self.module.field_spec(n, shape.items, shape.tokens), None, "data")
            for n in self.field_names()
        }

    def hidden_struct(self, shape: ModuleShape) -> jax.ShapeDtypeStruct:
        """Hidden states between layers, on one data rank."""
        fields = {
            n: self.module.field_spec(n, shape.items, shape.tokens)
            for n in self.module.inputs["entry"]
        }
        return jax.eval_shape(self.module.entry, self._part_struct("entry"), fields)

    def x_structs(self, shape: ModuleShape) -> dict[str, jax.ShapeDtypeStruct]:
        """What the segment receives: nothing, {"hidden": ...} or features by encoder."""
        if not self.plan.first:
            return {"hidden": self._global(self.hidden_struct(shape), None, "data")}
        if "visual" in self.module.inputs["entry"]:
            spec = self.module.field_spec("visual", shape.items, shape.tokens)
            return dict.fromkeys(self.encoders or ("visual",), self._global(spec, None, "data"))
        return {}

    def y_structs(self, shape: ModuleShape) -> Tree:
        """What the segment sends: hidden states, features, or the LLM's dict of sums."""
        hidden = self.hidden_struct(shape)
        if not self.plan.last:
            # As the next segment takes it, so that the transfer is a copy of equal pieces.
            return self._global(hidden, None, "data")
        out = self._exit_struct(shape)
        if isinstance(out, dict):
            each = jax.ShapeDtypeStruct(
                (self.microbatches, self.data_ranks),
                jnp.float32,
                sharding=self.sharding("stage", "data"),
            )
            return dict.fromkeys(out, each)
        return self._global(out, "stage", "data")

    def _exit_struct(self, shape: ModuleShape) -> Tree:
        fields = {
            n: self.module.field_spec(n, shape.items, shape.tokens)
            for n in self.module.inputs["exit"]
        }
        entry = self._part_struct("entry") if self.module.tied else None
        hidden = self.hidden_struct(shape)
        return jax.eval_shape(self.module.exit, self._part_struct("exit"), hidden, fields, entry)

    # ---- programs ----

    def loop(self, shape: ModuleShape) -> spmd_loop.SegmentLoop:
        out = self._exit_struct(shape) if self.plan.last else None
        return spmd_loop.SegmentLoop(
            module=self.module,
            first=self.plan.first,
            last=self.plan.last,
            stages=self.stages,
            microbatches=self.microbatches,
            trainable=self.trainable,
            sends_gradient=self.sends_gradient,
            remat=self.plan.remat,
            exit_keys=tuple(out) if isinstance(out, dict) else (),
        )

    def argument_structs(self, shape: ModuleShape, direction: str) -> tuple[Tree, ...]:
        """forward: (params, x, fields); backward: (params, x, fields, dy, grads)."""
        args = (self.placed_structs(), self.x_structs(shape), self.field_structs(shape))
        if direction == FORWARD:
            return args
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.sharding())
        dy = scale if self.loop(shape).is_llm_end else self.y_structs(shape)
        return (*args, dy, self.grad_structs())

    def output_structs(self, shape: ModuleShape, direction: str) -> Tree:
        """forward: y; backward: (sums of the LLM's end or {}, dx, grads, done)."""
        y = self.y_structs(shape)
        if direction == FORWARD:
            return y
        ranks = (self.stages, self.data_ranks)
        done = jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=self.sharding("stage", "data"))
        dx = self.x_structs(shape) if self.sends_gradient else {}
        return (y if self.loop(shape).is_llm_end else {}, dx, self.grad_structs(), done)

    def lower(self, shape: ModuleShape, direction: str) -> jax.stages.Lowered:
        """Program of a direction at a per-rank shape, ready to be compiled; it maps
        `argument_structs` to `output_structs`, and backward donates the gradients."""
        loop = self.loop(shape)
        args = self.argument_structs(shape, direction)
        outs = self.output_structs(shape, direction)
        in_specs, out_specs = jax.tree.map(_manual, args), jax.tree.map(_manual, outs)
        # Inside, each stage holds its share of the outputs' microbatches.
        shared = P("stage", "data")
        body: Any = spmd_loop.forward_program
        if direction == FORWARD:
            out_specs = jax.tree.map(lambda _: shared, outs)
        else:
            body = spmd_loop.backward_program
            in_specs = (*in_specs[:3], in_specs[3] if loop.is_llm_end else shared, in_specs[4])
        mapped: Any = jax.shard_map(
            partial(body, loop),
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={"stage", "data"},
        )
        shardings = jax.tree.map(lambda a: a.sharding, outs)
        donate = (4,) if direction == BACKWARD else ()
        return jax.jit(mapped, out_shardings=shardings, donate_argnums=donate).lower(*args)


@partial(jax.jit, static_argnums=(0, 1))
def _init(module: Module, part: str, key: Array) -> Params:
    # Compiled once per module and part, however many segments and plans there are.
    return module.init(part, key)


def _manual(struct: jax.ShapeDtypeStruct) -> P:
    """The part of a sharding that `shard_map` handles: every axis but "model"."""
    spec = struct.sharding.spec
    return P(*(None if axis == "model" else axis for axis in spec))


def trained_groups(model: MultimodalModel, freeze: Sequence[str]) -> tuple[str, ...]:
    """Freeze groups that train, in the order of the model.

    Raises:
      ValueError: unknown name in `freeze`, or everything frozen.
    """
    known = dict.fromkeys(g for m in model.modules.values() for g in m.freeze_groups.values())
    if unknown := set(freeze) - set(known):
        raise ValueError(f"cannot freeze {sorted(unknown)}; the model has {sorted(known)}")
    if set(freeze) >= set(known):
        raise ValueError("every part of the model is frozen; nothing is left to train")
    return tuple(g for g in known if g not in freeze)


def make_segments(
    model: MultimodalModel,
    plan: Plan,
    devices: list[jax.Device],
    *,
    freeze: tuple[str, ...] = (),
) -> dict[str, Segment]:
    """Segments of a plan by name, in topological order.

    Raises:
      ValueError: unknown name in `freeze`, everything frozen, too few devices, or a plan that
        does not cover the model's layers.
    """
    trained_groups(model, freeze)
    trains = {
        s.name: frozenset(
            part
            for part in parts_of(s, model.modules[s.module])
            if model.modules[s.module].freeze_groups[part] not in freeze
        )
        for s in plan.segments
    }
    backward = with_backward(plan, {n for n, parts in trains.items() if parts})
    encoders = tuple(m for m in plan.modules if m != "llm")
    segments: dict[str, Segment] = {}
    for s in plan.segments:
        if s.module not in model.modules:
            raise ValueError(f"the plan has a module {s.module!r} that the model lacks")
        module = model.modules[s.module]
        if plan.segments_of(s.module)[-1].stop != module.n_layers:
            raise ValueError(
                f"the plan covers {plan.segments_of(s.module)[-1].stop} layers of {s.module!r}, "
                f"the model has {module.n_layers}; it was made for another model"
            )
        segments[s.name] = Segment(
            plan=s,
            module=module,
            mesh=make_mesh(plan, s.submesh, devices),
            microbatches=plan.group_size,
            trainable=trains[s.name],
            sends_gradient=any(u.name in backward for u in upstream(plan, s)),
            encoders=encoders,
        )
    return segments


def parts_of(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """Parts of its module that a segment holds."""
    here = {"entry": s.first, "layers": True, "exit": s.last}
    here[ADAPTER] = ADAPTER in module.freeze_groups
    return tuple(part for part, is_here in here.items() if is_here)
