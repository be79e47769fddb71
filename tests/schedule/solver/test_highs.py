"""HiGHS as it is used here: it solves, and prints nothing."""

import subprocess
import sys

import highspy
import pytest

from dflop_jax.schedule.solver.highs import Highs, silent_for_others

OURS = """
import numpy as np
from dflop_jax.schedule.solver.highs import Highs

solver = Highs(mip_max_nodes=10)
solver.addVars(2, np.zeros(2), np.array([1.0, 2.0]))
solver.changeColsCost(2, np.arange(2, dtype=np.int32), -np.ones(2))
solver.run()
values = list(solver.getSolution().col_value)
assert values == [1.0, 2.0], values
"""

# As cvxpy makes a solver.
OTHERS = """
import cvxpy as cp
from dflop_jax.schedule.solver.highs import silent_for_others

x = cp.Variable(2, integer=True)
problem = cp.Problem(cp.Minimize(cp.sum(x)), [x >= 1.5])
with silent_for_others():
    problem.solve(solver=cp.HIGHS, threads=1)
assert problem.value == 4.0, problem.value
"""


@pytest.mark.parametrize("code", [OURS, OTHERS], ids=["ours", "others"])
def test_it_prints_nothing_from_its_first_moment(code):
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_what_others_make_later_is_theirs():
    plain = highspy.Highs
    with silent_for_others():
        assert highspy.Highs is Highs
    assert highspy.Highs is plain
