import pytest

from dflop_jax.checkpoint.store import CheckpointStore


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)
