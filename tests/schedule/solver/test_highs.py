"""HiGHS as it is used here: it solves, and prints nothing."""

import subprocess
import sys

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


def test_it_prints_nothing_from_its_first_moment():
    asked = [sys.executable, "-c", OURS]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
