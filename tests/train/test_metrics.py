"""What a run says of its FLOPs, against a count by hand of every batch, and traces of its steps."""

import dataclasses
import gzip
import json
from pathlib import Path

import jax
import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cli.experiment import load_experiment
from dflop_jax.data import make_loader
from dflop_jax.profile.needed import needed_flops
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train.trainer import Trainer
from models.llava import build
from tests.report.runs import cells_of

from .. import small
from ..plans import nano_profile
from .many import TWO, Jobs
from .resume_cases import CONFIG, NANO_MODEL, PLAN, fit

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")

NANO = {"model": NANO_MODEL}  # a model whose attention counts
PEAK, STEPS = 3e9, 4
TRAIN = dataclasses.replace(CONFIG.train, steps=STEPS, eval_every=0, peak_flops=PEAK)


@pytest.fixture(scope="module")
def run(quick, tmp_path_factory):
    """The folder of a run whose steps 1 and 2 are traced."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    fit(folder, train=dataclasses.replace(TRAIN, profile_steps="1:2"), **NANO)
    return folder


def by_hand(loads) -> dict[str, float]:
    """FLOPs that samples need, from the sizes of the model alone."""
    size = build("nano").size
    v, d = size.vision, size.decoder
    patches, px, kv = v.patches_per_tile, 3 * v.patch_px**2, d.n_kv_heads * d.head_dim
    tile = 2 * 2 * patches * px * v.width  # its pixels get no gradient
    tile += 3 * v.n_layers * 2 * patches * (4 * v.width**2 + 2 * v.width * v.mlp)
    tile += 3 * v.n_layers * 2 * 2 * patches * patches * v.width
    tile += 3 * 2 * v.tokens_per_tile * d.width * (v.merge**2 * v.width + d.width)
    token = 3 * d.n_layers * 2 * (2 * d.width**2 + 2 * d.width * kv + 3 * d.width * d.mlp)
    token += 3 * 2 * d.width * d.vocab
    flops = {"vision": 0.0, "llm": 0.0}
    for load in loads:
        n = sum(load.pieces["llm"])
        flops["vision"] += len(load.pieces.get("vision", ())) * tile
        flops["llm"] += n * token + 3 * d.n_layers * 2 * 2 * (n * (n + 1) // 2) * d.width
    return flops


def test_mfu_is_that_of_a_count_by_hand(run):
    config = dataclasses.replace(CONFIG, train=TRAIN, **NANO)
    trainer = Trainer(config, plan=PLAN, profile=nano_profile())
    loader = make_loader(config, trainer.source)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        loads = loader.loads(row["step"])
        flops = by_hand(loads)
        assert len({n for load in loads for n in load.pieces["llm"]}) > 1  # packed, not all alike
        assert row["padding_fraction"]["llm"] > 0
        assert row["model_flops_by_module"] == pytest.approx(flops, rel=1e-12)
        total = sum(flops.values())
        assert row["model_flops"] == pytest.approx(total, rel=1e-12)
        assert row["flops_per_s"] == pytest.approx(total / row["step_s"])
        assert row["mfu"] == pytest.approx(total / row["step_s"] / (PEAK * len(jax.devices())))
        for m in PLAN.layout.modules:  # each lies on one device of its own
            rate = flops[m] / row["step_s"]
            assert row["flops_per_s_by_module"][m] == pytest.approx(rate)
            assert row["mfu_by_module"][m] == pytest.approx(rate / PEAK)


def test_phases_add_up_to_the_step_and_memory_is_there(run):
    rows = read_metrics(run)
    # A later step's forward may be over before the step before it ends, where its seconds begin.
    assert set(rows[0]["phase_s"]) >= {"forward", "backward", "update", "idle"}
    for row in rows:
        assert sum(row["phase_s"].values()) == pytest.approx(row["step_s"])
        assert row["memory"]["host_bytes"] > 1e7
        assert row["imbalance"] == {"vision": 0.0, "llm": 0.0}  # one data rank
    cells = cells_of(run)
    assert set(cells) >= {"backward, of a step", "idle, of a step", "memory, host"}


def traced(run, process=0) -> list[Path]:
    return sorted(Path(run).glob(f"xprof/process-{process:05d}/plugins/profile/*/*.xplane.pb"))


def steps_in(trace: Path) -> set[str]:
    (file,) = trace.parent.glob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {e["args"]["step_num"] for e in events if e.get("name") == "step" and "args" in e}


def test_steps_are_traced_for_xprof_and_perfetto(run):
    (trace,) = traced(run)
    assert trace.stat().st_size > 0
    assert steps_in(trace) == {"1", "2"}


@pytest.mark.slow
def test_a_resumed_run_traces_what_is_left():
    fit("run", train=dataclasses.replace(TRAIN, steps=4), **NANO)
    assert traced("run") == []
    assert read_metrics("run")[0]["mfu"] is not None
    longer = dataclasses.replace(TRAIN, steps=6, peak_flops=0.0)
    fit("run", "resume", train=dataclasses.replace(longer, profile_steps="1:5"), **NANO)
    (trace,) = traced("run")
    assert steps_in(trace) == {"4", "5"}
    row = read_metrics("run")[-1]
    assert (row["mfu"], row["mfu_by_module"]) == (None, {})  # of a CPU no peak is known
    assert row["flops_per_s"] > 0


@pytest.mark.slow
def test_two_processes_add_up_and_are_both_traced(tmp_path):
    jobs = Jobs.make(tmp_path, TWO, steps=4)
    wanted = ["--train.profile_steps", "1:1", "--train.peak_flops", "2e9"]
    code, output = jobs.run(2, tmp_path / "run", *wanted, "--checkpoint.every_s", "1e-9")
    assert code == 0, output
    # Process 0 asked for the first once the first step had ended, while the second ran.
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[-1] == 2
    config = load_experiment(str(tmp_path / "small.py"))
    trainer = Trainer(config, plan=TWO, profile=nano_profile())
    loader = make_loader(config, trainer.source)
    needed = needed_flops(small.Small(), {"vision": small.PATCHES, "llm": 96})
    for row in read_metrics(tmp_path / "run"):
        flops = dict.fromkeys(needed, 0.0)
        for load in loader.loads(row["step"]):
            for module, pieces in load.pieces.items():
                flops[module] += sum(map(needed[module], pieces))
        assert min(flops.values()) > 0
        assert row["model_flops_by_module"] == pytest.approx(flops)
        assert row["mfu"] == pytest.approx(row["model_flops"] / row["step_s"] / (2 * 2e9))
    for process in (0, 1):
        (trace,) = traced(tmp_path / "run", process)
        assert steps_in(trace) == {"1"}
