"""One layer of each kind of a model: cases of `benchmarks/gpu_step.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_engine import SegmentOf, segment_cases
from gpu_measure import Bench, Case, Line

from dflop_jax.config import AttentionKernel, Dtype, ModelConfig
from dflop_jax.contract import layer_kinds_of
from dflop_jax.pipeline.fresh import zero_gradients
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.segment import Segment
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.records import BACKWARD, FORWARD, MeshShape, Remat, Shape
from dflop_jax.train.prepare import build_model

Tree = Any


def kind_cases(bench: Bench, factory: str, size: str, tokens: int) -> Iterator[Case]:
    """Forward and backward of a layer of each kind of a model's LLM between others, a row of
    `tokens`. Where programs run, outputs and gradients are compared with those of XLA's attention
    and recurrences in float32."""
    make = partial(_layer, bench, factory, size)
    kinds = layer_kinds_of(list(build_model(ModelConfig(factory, size)).modules.values())[-1])
    for kind in dict.fromkeys(kinds):
        shape = Shape(1, tokens)
        of_kind: SegmentOf = partial(make, kind, "bfloat16", "auto")
        found = list(segment_cases(bench, f"{size} {kind}", of_kind, shape, ("none",)))
        forward, backward = found
        if bench.runs:
            exact = cache(partial(_exact, make(kind, "float32", "xla", "none"), shape, backward))
            forward = replace(forward, check=partial(_hidden_errors, exact))
            backward = replace(backward, check=partial(_gradient_errors, exact))
        yield from (forward, backward)


def _layer(
    bench: Bench,
    factory: str,
    size: str,
    kind: str,
    dtype: Dtype,
    kernel: AttentionKernel,
    remat: Remat,
) -> Segment:
    model = build_model(ModelConfig(factory, size, dtype=dtype, attention_kernel=kernel))
    llm = list(model.modules)[-1]
    mesh = MeshShape()
    return shallow_segment(model, llm, 1, [bench.device], mesh, remat, ends=False, kind=kind)


def _exact(segment: Segment, shape: Shape, backward: Case) -> tuple[Tree, Tree, Tree]:
    """Hidden states, their gradient, and those of parameters, on the host, from the arguments of a
    case in float32."""
    params, x, fields, dy = _wide(backward.make()[:4])
    lowering = Lowering(segment)
    with jax.default_matmul_precision("highest"):
        y = lowering.lower(shape, FORWARD).compile()(params, x, fields)
        residuals = y.pop("residuals", {})
        back = lowering.lower(shape, BACKWARD).compile()
        _, dx, grads, _ = back(params, x, fields, dy, zero_gradients(segment), residuals)
    return jax.device_get((y["next"], dx, grads))


def _wide(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)


def _hidden_errors(exact: Callable[[], tuple[Tree, ...]], y: Tree) -> Line:
    return _errors(exact()[:1], y["next"])


def _gradient_errors(exact: Callable[[], tuple[Tree, ...]], outputs: tuple[Tree, ...]) -> Line:
    return _errors(exact()[1:], *outputs[1:3])


def _errors(exact: tuple[Tree, ...], *found: Tree) -> Line:
    """Of each tree the largest share that the error of a leaf has in its length."""

    def share(a: Any, b: Any) -> float:
        """On the host: every shape would be a program of its own."""
        mine, right = (np.asarray(x).astype(np.float32).ravel() for x in (a, b))
        off, length = float(np.linalg.norm(mine - right)), float(np.linalg.norm(right))
        return off / max(length, 1e-30)

    shares = [jax.tree.leaves(jax.tree.map(share, f, e)) for f, e in zip(found, exact, strict=True)]
    return {"errors": [max(s) for s in shares if s]}
