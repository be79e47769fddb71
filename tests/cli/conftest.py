"""A folder for every test of the command line, with an experiment, a plan and a profile in it."""

from pathlib import Path

import jax
import pytest

from dflop_jax.records.files import save
from tests.cli.command_line import EXPERIMENT
from tests.plans import NANO, nano_profile


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Relative paths land in tmp_path; the process keeps its devices."""
    jax.devices()  # started with conftest's 8, so that plan.devices cannot change their number
    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(EXPERIMENT)
    save(NANO, "nano_plan.json")
    save(nano_profile(), "nano_profile.json")
