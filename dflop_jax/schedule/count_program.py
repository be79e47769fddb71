"""The integer program of a batch. Its variables are the number of groups of each bucket, and the
number of samples of each size class in them. cvxpy compiles it once per plan; each batch fills in
its parameters.

This is DFLOP's per-batch program (arXiv 2603.25120, Online Microbatch Scheduler) in counts instead
of samples, so solutions that differ only in the numbering of groups are one solution. Its optimum
is also a lower bound, since every schedule of the batch satisfies its constraints.

Shape suffixes: C buckets, K size classes, M modules, R resources, D conditions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dflop_jax.records import Layout
from dflop_jax.schedule.balance_problem import Floats, Ints
from dflop_jax.schedule.batch import divided_modules, max_buckets
from dflop_jax.simulate.task_graph import submesh_resources

MAX_CLASSES = 16  # size classes of samples; doubling it doubles the size of the program


@dataclass(frozen=True)
class ProgramSizes:
    """The dimensions of a plan's program."""

    buckets: int
    modules: int
    resources: int
    classes: int = MAX_CLASSES
    conditions: int = 4 * MAX_CLASSES  # volume conditions, the tightest of a batch
    divided: int = 0  # modules with sub-microbatches: see `BatchParameters.is_bound`

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the program's parameters by name; see `_cvxpy_problem`."""
        c, k, m, r, d = self.buckets, self.classes, self.modules, self.resources, self.conditions
        return {
            "max_groups": (c,),
            "price": (c,),
            "shared": (c,),
            "shared_rest": (1,),
            "work": (r, c),
            "rest": (r,),
            "before": (r, c),
            "after": (r, c),
            "runs_on": (r, c),
            "busy": (r,),
            "same_end": (r,),
            "volume": (d, c),
            "need": (d,),
            "capacity": (m, c),
            "min_tokens": (m, k),
            "count": (k,),
            "max_samples": (k, c),
        }


@dataclass(frozen=True)
class CountProgram:
    """A plan's program in canonical form: min costs @ x, with G x + h = 0 in the first `equal` rows
    and >= 0 in the others. `fill` computes costs, G and h from a batch's parameters.

    Each of `numbers` is (index, parameter, factor): `fill` adds factor * parameter at the index.
    Parameters are those of `sizes`, flattened and concatenated, followed by a 1. Indices run over
    the costs [columns], then h [rows], then the `entries` (row, column) of G.
    """

    sizes: ProgramSizes
    columns: int
    rows: int
    equal: int
    buckets: int  # first column of the integer group counts
    samples: int  # first column of the sample counts [K, C], in column-major order
    entries: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[int, int, float], ...]

    @cached_property
    def _arrays(self) -> tuple[Ints, Ints, Floats, Ints]:
        """`numbers` as three arrays, and `entries`."""
        index, parameter, factor = map(np.array, zip(*self.numbers, strict=True))
        return index, parameter, factor, np.array(self.entries).T

    def fill(self, values: Mapping[str, Floats]) -> tuple[Floats, Floats, Any]:
        """Return (costs [columns], h [rows], G) for the parameters of a batch."""
        from scipy.sparse import csr_array

        flat = [np.ravel(values[name]) for name in self.sizes.parameters]
        parameters = np.concatenate([*flat, np.ones(1)])
        index, parameter, factor, cells = self._arrays
        n = self.columns + self.rows + len(self.entries)
        numbers = np.bincount(index, factor * parameters[parameter], n).astype(np.float64)
        costs, h, entries = np.split(numbers, [self.columns, self.columns + self.rows])
        return costs, h, csr_array((entries, tuple(cells)), (self.rows, self.columns))


def program_sizes(layout: Layout) -> ProgramSizes:
    """Return the dimensions of a layout's program."""
    return ProgramSizes(
        buckets=max_buckets(layout),
        modules=len(layout.modules),
        resources=len(set(submesh_resources(layout).values())),
        divided=len(divided_modules(layout)),
    )


@lru_cache
def canonicalize(sizes: ProgramSizes) -> CountProgram:
    """Return the program of these dimensions in canonical form, made by cvxpy."""
    import cvxpy as cp  # imports JAX, so only when needed, and never in the worker process

    problem, groups, samples = _cvxpy_problem(sizes)
    data, _, _ = problem.get_problem_data(cp.SCIPY, enforce_dpp=True)
    stuffed = data["param_prob"]
    # cvxpy flattens arrays by columns; ours are flat by rows.
    our_index = np.full(stuffed.total_param_size + 1, -1)
    n_before = 0
    for name, shape in sizes.parameters.items():
        our_indices = n_before + np.arange(math.prod(shape)).reshape(shape)
        first_theirs = stuffed.param_id_to_col[problem.param_dict[name].id]
        our_index[first_theirs : first_theirs + our_indices.size] = our_indices.ravel(order="F")
        n_before += our_indices.size
    our_index[-1] = n_before
    columns, rows = stuffed.x.size, stuffed.constr_size
    costs, matrix = stuffed.q.tocoo(), stuffed.A.tocoo()
    is_cost = costs.row < columns  # the last row is the objective's constant
    at_row, at_column = matrix.row % rows, matrix.row // rows
    inside = at_column < columns
    cells = np.stack([at_row[inside], at_column[inside]])
    entries, entry = np.unique(cells, axis=1, return_inverse=True)
    parts = [
        (costs.row[is_cost], costs.col[is_cost], costs.data[is_cost]),
        (columns + at_row[~inside], matrix.col[~inside], matrix.data[~inside]),
        (columns + rows + entry.ravel(), matrix.col[inside], matrix.data[inside]),
    ]
    index, their_parameter, factor = map(np.concatenate, zip(*parts, strict=True))
    numbers = zip(index.tolist(), our_index[their_parameter].tolist(), factor.tolist(), strict=True)
    return CountProgram(
        sizes,
        columns,
        rows,
        equal=stuffed.cone_dims.zero,
        buckets=stuffed.var_id_to_col[groups.id],
        samples=stuffed.var_id_to_col[samples.id],
        entries=tuple(map(tuple, entries.T.tolist())),
        numbers=tuple(numbers),
    )


def _cvxpy_problem(sizes: ProgramSizes) -> tuple[Any, Any, Any]:
    """Return (the program in cvxpy, its variables y and x). Integer y[c] is the number of groups of
    bucket c, x[k, c] the number of samples of class k in them.

    min  T + price @ y
    s.t. T >= work[r] @ y + rest[r] + before[r] @ first[r] + after[r] @ last[r] for each resource
           (before its first group and after its last group, other resources run tasks; if these
           groups differ, same_end[r] is 0),
         T >= shared @ y + shared_rest (devices that share cores),
         volume @ y >= need (`volume_conditions`),
         sum_c x[k, c] = count[k], x[k, c] <= max_samples[k, c],
         sum_k min_tokens[m, k] x[k, c] <= capacity[m, c] y[c] for each module,
         sum_c first[r, c] = sum_c last[r, c] = busy[r], both <= runs_on[r, c] y[c],
         first[r, c] + last[r, c] <= runs_on[r, c] y[c] + same_end[r],
         y <= max_groups.
    """
    import cvxpy as cp

    p = {name: cp.Parameter(shape, name=name) for name, shape in sizes.parameters.items()}
    y, makespan = cp.Variable(sizes.buckets, integer=True), cp.Variable()
    x = cp.Variable((sizes.classes, sizes.buckets))
    first = cp.Variable((sizes.resources, sizes.buckets))
    last = cp.Variable((sizes.resources, sizes.buckets))

    def groups_of_bucket(n: int) -> cp.Expression:
        """Return the number of groups of each bucket, repeated to [n, C]."""
        return np.ones((n, 1)) @ cp.reshape(y, (1, sizes.buckets), order="C")

    ends = cp.sum(cp.multiply(p["before"], first) + cp.multiply(p["after"], last), axis=1)
    constraints = [
        y >= 0,
        y <= p["max_groups"],
        makespan >= p["work"] @ y + p["rest"] + ends,
        makespan >= p["shared"] @ y + p["shared_rest"],
        p["volume"] @ y >= p["need"],
        x >= 0,
        x <= p["max_samples"],
        cp.sum(x, axis=1) == p["count"],
        p["min_tokens"] @ x <= cp.multiply(p["capacity"], groups_of_bucket(sizes.modules)),
    ]
    groups_there = cp.multiply(p["runs_on"], groups_of_bucket(sizes.resources))
    for end in (first, last):
        constraints += [end >= 0, cp.sum(end, axis=1) == p["busy"], end <= groups_there]
    same_end = cp.reshape(p["same_end"], (sizes.resources, 1), order="C")
    constraints += [first + last <= groups_there + same_end @ np.ones((1, sizes.buckets))]
    problem = cp.Problem(cp.Minimize(makespan + p["price"] @ y), constraints)
    for parameter in p.values():
        parameter.value = np.ones(parameter.shape)  # cvxpy needs values to canonicalise
    return problem, y, x
