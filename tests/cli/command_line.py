"""Command lines in this process, and the experiment that they are about."""

from dflop_jax.cli import main

EXPERIMENT = """
from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config():
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=64, max_tiles=2, max_frames=4, max_tokens=128, workers=1),
        plan=PlanConfig(policy="dflop", devices=2, max_model=1, buckets=2, sampled_batches=1,
                        max_microbatches=4, effort="quick"),
        train=TrainConfig(steps=3, global_batch=4),
        run_dir="run",
        cache_dir="cache",
    )
"""


def run(capsys, *args):
    """(exit code, stdout, stderr) of a command line."""
    try:
        code = main(args)
    except SystemExit as e:  # argparse leaves by this door
        code = e.code
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *args, exit_code=2):
    """The one line of a command line that is refused."""
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n"), err[-1:]) == (exit_code, "", 1, "\n")
    return err
