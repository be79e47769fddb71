"""Products in float32 where a function returns them: what adds them to float32 sums then reads no
rounded copy, and a GPU's library adds to the sums while it multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

_MOVES = ("transpose", "reshape", "squeeze")
_CALLS = ("checkpoint", "remat2", "jit", "pjit")


def widen_products(jaxpr: Any, outputs: Collection[int]) -> Any:
    """Return a jaxpr whose outputs of these numbers are float32 if they are products in bfloat16
    that nothing else reads, moved or not; other outputs are equal."""
    n_uses = Counter(v for e in jaxpr.eqns for v in e.invars if not isinstance(v, Literal))
    n_uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    wanted = {jaxpr.outvars[i] for i in outputs if not isinstance(jaxpr.outvars[i], Literal)}
    wanted = {v for v in wanted if _is_narrow(v) and n_uses[v] == 1}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in _MOVES and eqn.outvars[0] in wanted and n_uses[eqn.invars[0]] == 1:
            wanted.add(eqn.invars[0])
    wide: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        numbers = [i for i, v in enumerate(eqn.outvars) if v in wanted]
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general" and numbers and all(map(_is_narrow, eqn.invars)):
            params = {**params, "preferred_element_type": jnp.dtype(jnp.float32)}
        elif name in _CALLS and numbers:
            inner = params["jaxpr"]
            is_closed = isinstance(inner, ClosedJaxpr)
            new = widen_products(inner.jaxpr if is_closed else inner, numbers)
            numbers = [i for i in numbers if not _is_narrow(new.outvars[i])]
            params = {**params, "jaxpr": inner.replace(jaxpr=new) if is_closed else new}
        elif name not in _MOVES or eqn.invars[0] not in wide:
            numbers = []
        if numbers:
            for v in (eqn.outvars[i] for i in numbers):
                wide[v] = type(v)(v.aval.update(dtype=jnp.dtype(jnp.float32)))
            eqn = eqn.replace(
                invars=[v if isinstance(v, Literal) else wide.get(v, v) for v in eqn.invars],
                outvars=[wide.get(v, v) for v in eqn.outvars],
                params=params,
            )
        eqns.append(eqn)
    outvars = [v if isinstance(v, Literal) else wide.get(v, v) for v in jaxpr.outvars]
    return jaxpr.replace(
        eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names()
    )


def _is_narrow(v: Any) -> bool:
    return bool(v.aval.dtype == jax.dtypes.bfloat16)
