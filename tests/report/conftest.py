"""A complete run folder, written by hand."""

import pytest

from dflop_jax.config import Config
from dflop_jax.report.run_folder import RunFolder
from tests.report.runs import make_plan, make_row, pipeline_trace


@pytest.fixture
def make_run(tmp_path):
    """Function that writes a complete run folder and returns its path."""

    def make(name="run", n_steps=12, slow=1.0, policy="dflop"):
        with RunFolder(tmp_path / name) as run:
            run.write_config(Config())
            run.write_plan(make_plan(policy))
            for i in range(n_steps):
                run.append(make_row(i, step_s=slow * (0.5 + 0.01 * i), compiles=7 if i == 0 else 0))
            stages = {"enc": (0.03 * slow, 0.06 * slow), "llm": (0.04, 0.08)}
            sources = ("measured", "simulated")
            traces = [pipeline_trace(stages, [1.0, 0.9, 1.1, 1.0], source) for source in sources]
            run.write_trace(traces, {0: "vision:8x16"})
        return run.path

    return make
