"""Every message about a mistake says what to do, and a table of what is refused in one line.

The first part reads messages from the source by `ast`. The table has a call that is refused and how
its message reads, for functions whose mistakes no test of a command shows.
"""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dflop_jax.cli.launch import core_shares
from dflop_jax.config import Config, DistributedConfig, PlanConfig, TrainConfig, override
from dflop_jax.distributed.devices import devices_per_process, local_gpu_ids
from dflop_jax.distributed.processes import Address, Processes, find_processes
from dflop_jax.hardware import find_hardware
from tests.distributed.test_find_processes import LAUNCHED, SLURM

ROOT = Path(__file__).resolve().parents[1]
SAID = ("ValueError", "TransientError", "RunFailed", "FolderInUse")
# Rooms whose messages are reasons within another one, which says what to do: why a record, a
# picture or a file of an index is no good.
REASONS = ("data/datasets/", "data/media/", "data/text/", "data/process_pool.py", "data/bounds.py",
           "data/gathers.py", "data/packing.py", "data/sample.py")  # fmt: skip
# Functions that are called from Python: what they ask for is the remedy.
LIBRARY = ("checkpoint/format.py", "checkpoint/store.py", "contract.py",
           "profile/collectives.py", "profile/roofline.py", "records/", "report/metrics.py",
           "schedule/local_search.py", "simulate/", "plan/memory.py")  # fmt: skip

# Put together with what says it, where they are caught or made.
ELSEWHERE = {"…: coordinator …", "coordinator …: …", "--coordinator: …", "step …: …"}
# How a remedy is told from a fact: what is asked for, what is allowed, or what is known.
_ASKS = """add ask begin break call check choose close connect continue convert copy cut do download
    drop end export fix free freeze give install keep leave let look lower make mend merge move name
    open pass pip plan point profile put raise read remove rename repair report return run save say
    see set shorten show sort split start take train try use wait wrap write"""
REMEDY = re.compile(
    rf"(?:^|[;:,?—] |[(]|\b(?:or|and|then|else|to) )(?:{'|'.join(_ASKS.split())})\b"
    r"|did you mean|\bmust\b|\bis not one of\b|\bat least \d|\bknown: "
    r"|; (?:it has|it may|the model has|there are|what trains|the first is) "
    r"|\bchmod \d|\bdflop \w"
    r"|\{[^{}]*(?:remedy|hint|advice|other_model|_HOW|why_none|why_nothing)[^{}]*\}",
    re.IGNORECASE,
)


def messages() -> Iterator[tuple[str, str]]:
    """(file, message) of every `raise` of an error that a command says in a line, what is filled in
    between braces."""
    root = ROOT / "dflop_jax"
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(called, ast.Call) and called.args and ast.unparse(called.func) in SAID:
                for text in _texts(called.args[0]):
                    yield file.relative_to(root).as_posix(), " ".join(text.split())


def _texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(
                str(v.value) if isinstance(v, ast.Constant) else _filled(v) for v in values
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (a + b for a in _texts(left) for b in _texts(right))
        case ast.IfExp(body=one, orelse=other):
            yield from (*_texts(one), *_texts(other))
        case _:
            yield _filled(node)


def _filled(node: ast.AST) -> str:
    inside = node.value if isinstance(node, ast.FormattedValue) else node
    return "{" + re.sub(r"[{}]", "", ast.unparse(inside)) + "}"


def test_every_message_says_what_to_do():
    """Of those that stand alone, and are not part of another."""
    silent = {
        f"{file}: {text}"
        for file, text in messages()
        if re.search(r"[a-z]{3}", re.sub(r"\{.*?\}", "", text))
        and not file.startswith(REASONS + LIBRARY)
        and not REMEDY.search(text)
        and re.sub(r"\{[^{}]*\}", "…", text) not in ELSEWHERE
    }
    assert silent == set()


# ---- what is refused: (part of the message, what is called) ----

AT = Address("node1", 29400)


def find(environment=None, **flags):
    """A call that looks for the processes of a run under flags and an environment."""

    def call():
        with pytest.MonkeyPatch.context() as patch:
            for name in [n for n in os.environ if n.startswith(("DFLOP_", "SLURM_", "OMPI_"))]:
                patch.delenv(name)
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            find_processes(DistributedConfig(**flags))

    return call


def shares(n, **attributes):
    """A call that shares five cores among `n` processes."""

    def call():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7, 9}, raising=False)
            if not attributes.get("can_pin", True):
                patch.delattr(os, "sched_setaffinity", raising=False)
            core_shares(n)

    return call


def gpus(visible, *processes):
    """A call that shares visible GPUs."""

    def call():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
            local_gpu_ids(Processes(*processes), 0)

    return call


def devices(n, plan_devices, each=0):
    return lambda: devices_per_process(Processes(n, 0, AT, devices_per_process=each), plan_devices)


def config(**values):
    """A call that overrides fields, with "__" for dots."""
    return lambda: override(Config(), {k.replace("__", "."): v for k, v in values.items()})


def decode(text):
    return lambda: msgspec.json.decode(text, type=Config)


H100 = find_hardware("h100")
REFUSED = [
    ("plan.devices=8 cannot be shared evenly by 3 processes; give a multiple", devices(3, 8)),
    ("2 processes of 2 devices have 4; give --plan.devices 4, or 0", devices(2, 8, 2)),
    ("2 processes on this host need 1 GPUs each, but it has 1", gpus("0", 2, 0, AT, "dflop launch",
     2, 0)),
    ("6 processes need 6 cores, but there are 5", shares(6)),
    ("cannot pin processes to cores; leave it out", shares(1, can_pin=False)),
    ("--distributed.num_processes and --distributed.process_id must be given too",
     find(coordinator="node1:1")),
    ("--distributed.coordinator must be given too: all three, or none",
     find(num_processes=2, process_id=0)),
    ("distributed: process 2 of 2; the first is 0, the last 1",
     find(coordinator="n:1", num_processes=2, process_id=2)),
    ("process -2 of 2", find(coordinator="n:1", num_processes=2, process_id=-2)),
    ("coordinator: 'n' is not HOST:PORT", find(coordinator="n", num_processes=2, process_id=0)),
    ("DFLOP_COORDINATOR and DFLOP_NUM_PROC", find({"DFLOP_PROCESS_ID": "0"})),
    ("DFLOP_PROCESS_ID='one' is not a number", find(LAUNCHED | {"DFLOP_PROCESS_ID": "one"})),
    ("dflop launch: process 4 of 4; the first is 0", find(LAUNCHED | {"DFLOP_PROCESS_ID": "4"})),
    ("DFLOP_COORDINATOR: 'here' is not HOST", find(LAUNCHED | {"DFLOP_COORDINATOR": "here"})),
    ("DFLOP_DEVICES_PER_PROCESS='-1' is not a", find({"DFLOP_DEVICES_PER_PROCESS": "-1"})),
    ("JAX_COORDINATOR_ADDRESS: 'x' is not HOST", find(SLURM | {"JAX_COORDINATOR_ADDRESS": "x"})),
    ("unknown override train.step; did you mean train.steps?", config(train__step="3")),
    ("unknown override zzzzzz; see --help for the names", config(zzzzzz="x")),
    ("unknown override train.remat_layers; did you mean", config(train__remat_layers="true")),
    ("Expected `int`, got `str` - at `train.steps`; give a whole", config(train__steps="many")),
    ("`train.steps`", config(train__steps="1.5")),
    ("got `str` - at `train.learning_rate`; give a n", config(train__learning_rate="fast")),
    ("`data.blank_images`", config(data__blank_images="maybe")),
    ("model.dtype='float16' is not one of float32, bfloat16", config(model__dtype="fp16")),
    ("plan.policy='best' is not one of auto, dflop, orch, ", config(plan__policy="best")),
    *((f"profile_steps={text!r}: write FIRST:LAST", config(train__profile_steps=text))
      for text in ("3", "2:", "-1:2", "3:2", "1:2:3")),
    ("has 'vision'; write NAME=RATE, such as", config(train__learning_rates="vision")),
    ("has '=1e-5'; write NAME=RATE", config(train__learning_rates="=1e-5")),
    ("llm=0.0 must be a finite number above", config(train__learning_rates="llm=0")),
    ("gives 'a' twice; drop one of them", config(train__learning_rates="a=1,a=2")),
    ("llm=-1.0 must be a finite number, 0 or", config(train__weight_decays="llm=-1")),
    ("train.optimizer='sgd' is not one of adamw, lion", config(train__optimizer="sgd")),
    ("moments_dtype=bfloat16 is too coarse for train.beta2=0.999",
     config(train__moments_dtype="bfloat16", train__beta2="0.999")),
    ("train.remat='true' is not one of auto, none, dots, named,", config(train__remat="true")),
    ("vision=0 must be a whole number above 0", config(train__lora_ranks="vision=0")),
    ("vision=2.5 must be a whole number", config(train__lora_ranks="vision=2.5")),
    ("has 'vision'; write PATTERN=RANK, such as", config(train__lora_ranks="vision")),
    ("set the same thing; give one", config(train__steps="3", train__epochs="1")),
    ("data.columns has 'chat'; write FIELD=COLUMN", config(data__columns="chat")),
    ("gives 'image' twice; drop one", config(data__columns="image=a,image=b")),
    ("10 is longer than the run of 5", config(train__steps="5", train__warmup_steps="10")),
    *(("give a number, or a size such as 80GB", config(plan__memory_bytes=text))
      for text in ("80 XB", "GB", "1.2.3GB", "80GB80", "")),
    ("plan.policy='best' is not one of auto", lambda: Config(plan=PlanConfig(policy="best"))),
    ("train.steps=0 must be at least 1", lambda: Config(train=TrainConfig(steps=0))),
    ("`$.train.steps`", decode('{"train": {"steps": 0}}')),
    ("`$.plan.policy`", decode('{"plan": {"policy": "best"}}')),
    ("llm=0.0 must be a", decode('{"train": {"learning_rates": ["llm=0"]}}')),
    *(("known: a100-40, a100-80, h100, h200, b200", partial(find_hardware, name))
      for name in ("v100", "", "a100")),
    ("'int3'; known: bfloat16, float16, float32", lambda: H100.peak_flops("int3")),
    *(("'h100': memory_bytes", partial(replace, H100, memory_bytes=value))
      for value in (0.0, -1.0, math.inf, math.nan)),
]  # fmt: skip


@pytest.mark.parametrize("says, call", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_a_mistake_is_refused_in_one_line(says, call):
    with pytest.raises((ValueError, msgspec.ValidationError)) as refused:
        call()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
