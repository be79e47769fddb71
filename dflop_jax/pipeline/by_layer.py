"""An optimizer that looks at whole parameters of a layer, as a published checkpoint has them.

For a step the layers of a stage are dealt out over its data and tensor ranks: each gets whole
layers, in turns, makes their steps, and gives back to all what they hold. One all-to-all each way
moves a rank's own shard; a turn's layers are whole one at a time. Parameters of the ends are no
layers: the compiler is left to make what it needs of them where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, Module, last_key
from dflop_jax.pipeline.cut import Cut, axes_of
from dflop_jax.pipeline.elementwise import NO_PART, WHOLE, Elementwise, map_state, step
from dflop_jax.pipeline.matrices import is_matrix, published_shape
from dflop_jax.pipeline.parts import logical_axes, part_struct
from dflop_jax.pipeline.segment import Segment

Tree = Any
RANKS = ("data", "model")
BY_STAGE = Cut(P("stage"), P("stage"))


@dataclass(frozen=True)
class LayerOptimizer:
    """`whole` makes the steps of whole matrices, of every parameter if `takes_all`; `rest` those of
    single elements of all others."""

    whole: optax.GradientTransformation
    rest: optax.GradientTransformation
    takes_all: bool = False

    def takes(self, module: Module, part: str) -> Tree:
        """Whether `whole` takes a parameter, for each of a part."""

        def one(path: Any, axes: Any) -> bool:
            return self.takes_all or is_matrix(part, last_key(path), axes)

        axes = logical_axes(module, part)
        return jax.tree.map_with_path(one, axes, is_leaf=_is_names)


Stepping: TypeAlias = "optax.GradientTransformation | LayerOptimizer"


@dataclass(frozen=True)
class Averaged:
    """An optimizer that also keeps an average of the parameters after its steps, of which `decay`
    stays at every step."""

    stepping: Stepping
    decay: float

    def after(self, average: Tree, params: Tree) -> Tree:
        """The average after a step to these parameters; a parameter that no step changes is its
        average bit for bit, also where it is infinite, as bounds that bound nothing are."""

        def one(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(old == new, new, new + self.decay * (old - new))

        return jax.tree.map(one, average, params)


Optimizer: TypeAlias = "Stepping | Averaged"


def published_structs(module: Module, part: str) -> Tree:
    """Float32 structs of a part, or of one layer of it, as a published checkpoint has them."""

    def one(path: Any, leaf: jax.ShapeDtypeStruct, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(published_shape(leaf.shape, last_key(path), axes), jnp.float32)

    return jax.tree.map_with_path(one, part_struct(module, part), logical_axes(module, part))


def kept(takes: Tree, tree: Tree) -> Tree:
    """The leaves of a tree that are taken, nothing in the place of the others."""
    return jax.tree.map(lambda yes, leaf: leaf if yes else optax.MaskedNode(), takes, tree)


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple)


@dataclass(frozen=True)
class _Dealing:
    """How the layers of a stack, [layers, ...] over the stages, are dealt out."""

    mesh: Mesh
    n_layers: int

    @property
    def _shape(self) -> tuple[int, int, int]:
        """(turns, stages, ranks of a stage)."""
        stages, ranks = self.mesh.shape["stage"], self.mesh.size // self.mesh.shape["stage"]
        return -(-self.n_layers // stages // ranks), stages, ranks

    def _as(self, array: Array, *spec: Any) -> Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, P(*spec)))

    def deal(self, cut: Cut, held: Array, shape: tuple[int, ...]) -> Array:
        """A stack as it is held -> [turns, stages, ranks, *shape], zeros after the last layer of a
        stage."""
        turns, stages, ranks = self._shape
        if cut.part:
            held = held[..., : cut.length]
        stack = held.reshape(stages, -1, *held.shape[1:])
        n_zeros = turns * ranks - stack.shape[1]
        stack = jnp.pad(stack, [(0, 0), (0, n_zeros)] + [(0, 0)] * (stack.ndim - 2))
        stack = self._as(stack, "stage", "data", *_over_model(cut))
        layers = cut.release(self._as(stack, "stage", RANKS))
        dealt = jnp.moveaxis(layers.reshape(stages, ranks, turns, *shape), 2, 0)
        return self._as(dealt, None, "stage", RANKS)

    def collect(self, cut: Cut, dealt: Array, layer: tuple[int, ...]) -> Array:
        """The inverse of `deal`; `layer` is the shape of one layer's parameter."""
        turns, stages, ranks = self._shape
        stack = jnp.moveaxis(dealt, 0, 2).reshape(stages, turns * ranks, *layer)
        held = self._as(cut.hold(stack), "stage", "data", *_over_model(cut))
        held = self._as(held, "stage", None, *cut.spec[1:])
        held = held[:, : self.n_layers // stages]
        return self._as(held.reshape(self.n_layers, *held.shape[2:]), *cut.spec)


def _over_model(cut: Cut) -> Iterator[Any]:
    """How the dims behind the layers' are split over tensor ranks alone. Over these and data ranks
    at once the compiler would first make every layer whole on every device."""
    for dim in cut.spec[1:]:
        yield "model" if "model" in axes_of(dim) else None


@dataclass(frozen=True)
class _StateLeaf:
    """A leaf of a part's state: like a parameter ("held", and held as that is), a layer's own
    ("own", of another shape), or of none ("shared"); `struct` is that of one layer."""

    kind: Literal["held", "own", "shared"]
    struct: jax.ShapeDtypeStruct
    param: tuple[Cut, jax.ShapeDtypeStruct] | None = None  # how it is cut and held


class ByLayer:
    """State of a `LayerOptimizer` for parameters as `Elementwise` has them: {"rest": state of what
    is stepped element by element, "whole": by part the state of what is stepped whole}. What that
    has of another shape than the parameter's is on every rank of a stage."""

    def __init__(self, segment: Segment, optimizer: LayerOptimizer, cuts: Tree, shards: Tree):
        self._segment, self._tx = segment, optimizer.whole
        self._module = module = segment.module
        self._takes = {p: optimizer.takes(module, p) for p in shards}
        leaves = jax.tree.map(lambda yes: not yes, self._takes)
        rest = kept(leaves, cuts), kept(leaves, shards)
        self._left, self._rest = leaves, Elementwise(segment, optimizer.rest, *rest)
        taken = [p for p in shards if any(jax.tree.leaves(self._takes[p]))]

        def mine(trees: Tree) -> Tree:
            return {p: {p: kept(self._takes[p], trees[p])} for p in taken}

        self._cuts = mine(cuts)
        self._layers = mine({p: part_struct(module, p) for p in taken})
        self._published = mine({p: published_structs(module, p) for p in taken})
        self._shards = mine(shards)
        self._leaves = {p: self._state_leaves(p) for p in taken}
        self.structs = {"rest": self._rest.structs, "whole": self._of_leaves(self._struct)}

    # ---- the state ----

    def _state_leaves(self, part: str) -> Tree:
        def like(sub: Tree) -> Tree:
            return jax.tree.map(
                lambda leaf, whole, cut, held: _StateLeaf(
                    "held" if leaf.shape == whole.shape else "own", leaf, (cut, held)
                ),
                sub, self._published[part], self._cuts[part], self._shards[part],
            )  # fmt: skip

        one = jax.eval_shape(self._tx.init, self._published[part])
        return map_state(like, lambda leaf: _StateLeaf("shared", leaf), one, self._published[part])

    def _rows(self, part: str) -> int:
        """Layers of a stack; 0: the part is none."""
        return len(self._segment.held_rows.get(part, ()))

    def _of_leaves(self, of: Any) -> Tree:
        return {
            p: jax.tree.map(lambda leaf, p=p: of(p, leaf), tree) for p, tree in self._leaves.items()
        }

    def _cut(self, part: str, leaf: _StateLeaf) -> Cut:
        if leaf.kind == "held":
            assert leaf.param
            return leaf.param[0]
        return BY_STAGE if leaf.kind == "own" and self._rows(part) else WHOLE

    def _struct(self, part: str, leaf: _StateLeaf) -> jax.ShapeDtypeStruct:
        shape, sharding = leaf.struct.shape, self._segment.sharding(*self._cut(part, leaf).spec)
        if leaf.kind == "held":
            assert leaf.param
            shape = leaf.param[1].shape
        elif leaf.kind == "own" and self._rows(part):
            shape = (self._rows(part), *shape)
        return jax.ShapeDtypeStruct(shape, leaf.struct.dtype, sharding=sharding)

    def fresh(self) -> Tree:
        """The state before the first step; see `Elementwise.fresh`."""
        whole = {}
        for part, published in self._published.items():
            one = self._tx.init(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), published))
            whole[part] = jax.tree.map(
                lambda value, leaf, struct: jnp.zeros(struct.shape, struct.dtype)
                if leaf.kind == "held"
                else jnp.broadcast_to(value, struct.shape),
                one, self._leaves[part], self.structs["whole"][part],
            )  # fmt: skip
        return {"rest": self._rest.fresh(), "whole": whole}

    def cuts(self) -> Tree:
        """See `Elementwise.cuts`."""
        return {"rest": self._rest.cuts(), "whole": self._of_leaves(self._cut)}

    def parts(self) -> Tree:
        """See `Elementwise.parts`."""
        names = self._of_leaves(lambda part, leaf: NO_PART if leaf.kind == "shared" else part)
        return {"rest": self._rest.parts(), "whole": names}

    # ---- a step ----

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """See `Elementwise.update`."""
        left = kept(self._left, grads), state["rest"], kept(self._left, params)
        steps, rest = self._rest.update(*left)
        whole = {}
        for part in self._leaves:
            g, p = ({part: kept(self._takes[part], tree[part])} for tree in (grads, params))
            of_part = self._by_layers if self._rows(part) else self._at_once
            made, whole[part] = of_part(part, g, p, state["whole"][part])
            steps[part] = jax.tree.map(
                lambda yes, new, old: new if yes else old,
                self._takes[part], made[part], steps[part],
            )  # fmt: skip
        return steps, {"rest": rest, "whole": whole}

    def _at_once(self, part: str, grads: Tree, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The step of a part that is no stack."""
        cuts, published, layers = self._cuts[part], self._published[part], self._layers[part]

        def whole(cut: Cut, array: Array, like: jax.ShapeDtypeStruct) -> Array:
            return cut.release(array).reshape(like.shape)

        def held(cut: Cut, array: Array, shape: tuple[int, ...]) -> Array:
            made = cut.hold(array.reshape(shape))
            return jax.lax.with_sharding_constraint(made, self._segment.sharding(*cut.spec))

        def state_in(leaf: _StateLeaf, array: Array) -> Array:
            return whole(self._cut(part, leaf), array, leaf.struct)

        def state_out(leaf: _StateLeaf, array: Array, old: Array) -> Array:
            cut = self._cut(part, leaf)
            return held(cut, array, cut.shape_of(old.shape))

        g, p = (jax.tree.map(whole, cuts, tree, published) for tree in (grads, params))
        s = jax.tree.map(state_in, self._leaves[part], state)
        steps, new = step(self._tx, g, s, p, self._module)
        return (
            jax.tree.map(lambda cut, a, like: held(cut, a, like.shape), cuts, steps, layers),
            jax.tree.map(state_out, self._leaves[part], new, state),
        )

    def _by_layers(self, part: str, grads: Tree, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The step of a stack."""
        dealing = _Dealing(self._segment.mesh, self._rows(part))
        cuts, published, layers = self._cuts[part], self._published[part], self._layers[part]
        known, tree = jax.tree.flatten(self._leaves[part])
        arrays = jax.tree.leaves(state)
        own = [i for i, leaf in enumerate(known) if leaf.kind != "shared"]

        def deal(arrays: Tree) -> Tree:
            return jax.tree.map(
                lambda c, a, s: dealing.deal(c, a, s.shape), cuts, arrays, published
            )

        dealt = [
            dealing.deal(self._cut(part, known[i]), arrays[i], known[i].struct.shape) for i in own
        ]

        def one(grads: Tree, params: Tree, mine: list[Array]) -> tuple[Tree, list[Array]]:
            full = list(arrays)
            for i, array in zip(own, mine, strict=True):
                full[i] = array
            steps, new = step(self._tx, grads, jax.tree.unflatten(tree, full), params, self._module)
            return steps, jax.tree.leaves(new)

        on_ranks = jax.vmap(jax.vmap(one))
        _, (steps, new) = jax.lax.scan(
            lambda _, turn: (None, on_ranks(*turn)), None, (deal(grads), deal(params), dealt)
        )
        steps = jax.tree.map(lambda c, a, s: dealing.collect(c, a, s.shape), cuts, steps, layers)
        for i, leaf in enumerate(known):
            if leaf.kind == "shared":  # equal for all layers
                new[i] = new[i][0, 0, 0]
                continue
            cut = self._cut(part, leaf)
            new[i] = dealing.collect(cut, new[i], cut.shape_of(arrays[i].shape)[1:])
        return steps, jax.tree.unflatten(tree, new)
