"""HiGHS as every model here uses it: on one thread, and silent from its first moment."""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np

from dflop_jax.schedule.solver.problem import Floats, Ints


class Highs(highspy.Highs):
    """Prints nothing, though highspy 1.16 names itself on stdout as soon as callbacks are enabled,
    which its constructor does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, value in {"threads": 1, "parallel": "off", **options}.items():
            self.setOptionValue(name, value)

    def enableCallbacks(self) -> None:  # as highspy spells it
        self.silent()
        super().enableCallbacks()


def integer_program(
    costs: Floats,
    rows: tuple[Ints, Ints, Floats],
    row_bounds: tuple[Floats, Floats],
    integers: Ints,
) -> highspy.HighsLp:
    """min costs @ x, its rows within bounds and x free, whole where `integers` says so. `rows` are
    (start of each row and the end, columns, values)."""
    n = len(costs)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = n, len(row_bounds[0])
    program.col_cost_ = costs
    program.col_lower_, program.col_upper_ = np.full(n, -np.inf), np.full(n, np.inf)
    program.row_lower_, program.row_upper_ = row_bounds
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = rows
    kinds = np.full(n, highspy.HighsVarType.kContinuous)
    kinds[integers] = highspy.HighsVarType.kInteger
    program.integrality_ = kinds.tolist()
    return program
