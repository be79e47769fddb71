"""What jax and XLA are told about the processes of a run, and a few real starts of two."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from dflop_jax.config import DistributedConfig
from dflop_jax.distributed import devices as own_devices
from dflop_jax.distributed import initialize as joining
from dflop_jax.distributed.devices import (
    devices_per_process,
    is_xla_flag,
    local_gpu_ids,
    uses_cpu,
    xla_environment,
)
from dflop_jax.distributed.initialize import initialize, run_devices
from dflop_jax.distributed.processes import Address, Processes, free_port
from dflop_jax.records import USABLE_MEMORY

AT = Address("node1", 29400)
FLAGS = DistributedConfig(coordinator="node1:29400", num_processes=2, process_id=1)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """Whatever starts the tests, they are one process."""
    for name in [n for n in os.environ if n.startswith(("DFLOP_", "SLURM_", "OMPI_", "CUDA_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "number, told, plan, each",
    [(1, 0, 0, 0), (1, 0, 8, 8), (2, 0, 8, 4), (4, 0, 0, 0), (2, 3, 0, 3), (2, 3, 6, 3)],
)
def test_devices_are_shared_evenly(number, told, plan, each):
    assert devices_per_process(Processes(number, 0, AT, devices_per_process=told), plan) == each


@pytest.mark.parametrize(
    "gpus, local_number, local_index, each, share",
    [
        ("0,1,2,3", 1, 0, 0, [0, 1, 2, 3]),
        ("0,1,2,3", 2, 1, 0, [2, 3]),
        ("4,5,6,GPU-8f", 4, 3, 1, [3]),
        ("0,1,2", 2, 1, 0, [1]),
        ("6", 8, 6, 0, None),  # Slurm's --gpus-per-task=1
    ],
)
def test_gpus_are_shared(monkeypatch, gpus, local_number, local_index, each, share):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    found = Processes(8, 6, AT, "Slurm", local_number, local_index)
    assert local_gpu_ids(found, each) == share


@pytest.mark.parametrize(
    "platforms, plugin, gpus, cpu",
    [
        ("cpu", True, "0", True),
        ("cuda,cpu", False, "", False),
        *((None, plugin, gpus, not (plugin and gpus)) for plugin in (0, 1) for gpus in ("", "0")),
    ],
)
def test_on_cpu(monkeypatch, platforms, plugin, gpus, cpu):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(own_devices.importlib.util, "find_spec", lambda _: plugin or None)
    kept = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        assert uses_cpu() is cpu
    finally:
        jax.config.update("jax_platforms", kept)


class _Device:
    platform = "cpu"

    def __init__(self, process_index: int, id: int):
        self.process_index, self.id = process_index, id


FLAGS_OF = {
    True: "--xla_gpu_shard_autotuning=false --xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_dot_merger_threshold_mb=0",
    False: "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1",
}
MEMORY = "XLA_CLIENT_MEM_FRACTION"
GPU = {MEMORY: str(USABLE_MEMORY), "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize("on_gpus", [True, False])
def test_the_environment_of_xla_has_what_the_user_does_not_set(monkeypatch, on_gpus):
    monkeypatch.setattr(own_devices, "is_xla_flag", lambda flag: True)
    flags, settings = FLAGS_OF[on_gpus], GPU if on_gpus else {}
    first, *others = flags.split()
    assert xla_environment({}, on_gpus=on_gpus) == {**settings, "XLA_FLAGS": flags}
    mine = {"XLA_PYTHON_" + MEMORY[4:]: ".5", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    mine["XLA_FLAGS"] = f"--xla_a=1 {first.replace('false', 'true')}"
    found = xla_environment(mine, on_gpus=on_gpus)
    assert found == {"XLA_FLAGS": " ".join([*others, mine["XLA_FLAGS"]])}
    assert xla_environment({**mine, "XLA_FLAGS": flags}, on_gpus=on_gpus) == {}
    monkeypatch.setattr(own_devices, "is_xla_flag", lambda flag: False)
    assert xla_environment({}, on_gpus=on_gpus) == settings


def test_known_flags_are_those_that_xla_takes():
    """The libraries describe flags that are no more; naming one ends the process."""
    assert not is_xla_flag("xla_gpu_no_such_flag")
    assert is_xla_flag("xla_cpu_use_fusion_emitters") == (jax.__version_info__ < (0, 11))
    assert is_xla_flag("xla_backend_optimization_level")
    code = "from jaxlib import xla_client as x; x.CompileOptions().executable_build_options."
    gone = "xla_gpu_enable_async_all_gather"
    for flag, known in ((gone, False), *((f, True) for f in own_devices.GPU_FLAGS)):
        assert is_xla_flag(flag) == known
        value = {**os.environ, "XLA_FLAGS": f"--{flag}=0"}
        command = [sys.executable, "-c", f"{code}debug_options"]
        run = subprocess.run(command, env=value, capture_output=True)
        assert (run.returncode == 0) == known


@pytest.mark.parametrize("is_started", [True, False])
def test_the_environment_is_set_before_jax_starts(monkeypatch, is_started):
    monkeypatch.setattr(own_devices, "uses_cpu", lambda: False)
    monkeypatch.setattr(own_devices, "is_jax_initialized", lambda: is_started)
    for name in (MEMORY, "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    own_devices.set_xla_environment()
    assert (MEMORY in os.environ) == ("XLA_FLAGS" in os.environ) == (not is_started)


def test_run_devices(monkeypatch):
    devices = [_Device(1, 2), _Device(0, 1), _Device(0, 0), _Device(1, 3)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert [d.id for d in run_devices(2, 0)] == [0, 1, 2, 3]
    assert run_devices(2, 4) == run_devices(2, 0)
    with pytest.raises(ValueError, match=r"plan.devices=2, but the 2 processes have 4 cpu devices"):
        run_devices(2, 2)
    devices.pop()
    with pytest.raises(ValueError, match=r"different numbers of devices \(2 on 0, 1 on 1\)"):
        run_devices(2, 0)
    with pytest.raises(ValueError, match=r"\(2 on 0, 1 on 1, 0 on 2\)"):
        run_devices(3, 3)


def test_one_process_needs_nothing_and_several_an_unused_jax(monkeypatch):
    jax.devices()
    with pytest.raises(ValueError, match="jax is in use already"):
        initialize(FLAGS)
    assert initialize(DistributedConfig()).n_processes == 1
    monkeypatch.setenv("DFLOP_DEVICES_PER_PROCESS", "2")
    assert initialize(DistributedConfig()).n_processes == 1
    assert joining.shutdown()


JOIN = """
import faulthandler, os, signal, sys, threading, time
faulthandler.enable()
import jax
jax.config.update("jax_platforms", "cpu")
from dflop_jax.config import DistributedConfig
from dflop_jax.distributed import devices as own_devices
from dflop_jax.distributed import initialize as joining, process_exit
what, *more = sys.argv[1:]
if what == "leave" and more:
    os.environ["DFLOP_NUM_PROCESSES"] = more[0]
config = DistributedConfig(connect_timeout_s=60.0, peer_timeout_s=3.0)
me = joining.initialize(config, plan_devices=4)
assert joining.initialize(config, plan_devices=4) is me
devices = joining.run_devices(me.n_processes, 4)
assert [d.process_index for d in devices] == [0, 0, 1, 1]
if sys.platform == "linux":  # gloo's thread, which has no name of its own; XLA's begin with tf_
    threads = map(int, os.listdir("/proc/self/task"))
    (patient,) = [t for t in threads if os.sched_getscheduler(t) == os.SCHED_BATCH]
    with open(f"/proc/self/task/{patient}/comm") as name:
        assert not name.read().startswith("tf_")

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def sharding(devices):
    return NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))

def array(devices):
    values, shape = np.arange(4, dtype=np.float32), (4,)
    part = values.__getitem__
    return jax.make_array_from_callback(shape, sharding(devices), part, dtype=values.dtype)

everywhere = NamedSharding(Mesh(np.array(devices), ("x",)), P())
total = jax.jit(lambda v: v.sum(), out_shardings=everywhere)(array(devices))  # through gloo
moved = jax.device_put(array(devices[:2]), sharding(devices[2:]))  # from process to process
here = [float(s.data[0]) for s in moved.addressable_shards]
print("got", float(total), here, flush=True)
if what == "leave":
    assert joining.shutdown(60.0)
    assert process_exit.exit_if_joined(5) == 5  # it may go on alone
    assert not jax.distributed.is_initialized()
    print("left", flush=True)
elif what == "fail":  # the launcher learns of it, though process 0 is busy and never comes
    if me.process_index == int(more[0]):
        process_exit.exit_if_joined(6)
    time.sleep(600)
elif what == "lose":
    me.barrier("computed")
    time.sleep(1.0)  # the others have passed it
    if me.process_index == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGSTOP if sys.argv[3] == "stop" else signal.SIGKILL)
    time.sleep(600)
"""


def start(tmp_path: Path, *args: str, **named) -> subprocess.Popen[str]:
    text = named["env"].pop("JOIN", JOIN) if "env" in named else JOIN
    (tmp_path / "join.py").write_text(text)
    return subprocess.Popen(
        [*args[:-1], str(tmp_path / "join.py"), *args[-1].split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **named,
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it wrote; one that hangs says where."""
    try:
        return process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate()
        raise AssertionError(f"hung: {out}{err}") from None


def test_two_processes_meet_compute_and_leave(tmp_path):
    launch_two = [sys.executable, "-m", "dflop_jax.cli", "launch", "-n", "2", "--", "python"]
    process = start(tmp_path, *launch_two, "leave")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    # Nothing of gloo's greetings, so that `--json` stays readable.
    assert sorted(out.splitlines()) == ["[1] got 6.0 [0.0, 2.0]", "[1] left", "got 6.0 []", "left"]
    assert "Traceback" not in err
    assert "Check failure" not in err


def started_by_hand(tmp_path: Path, *words: str, number: int = 2, **named) -> list[Any]:
    """Processes that no launcher watches, each with its own words."""
    port = free_port()
    return [
        start(
            tmp_path,
            *(sys.executable, said),
            env={
                **os.environ,
                "DFLOP_COORDINATOR": f"127.0.0.1:{port}",
                "DFLOP_NUM_PROCESSES": str(number),
                "DFLOP_PROCESS_ID": str(i),
                "http_proxy": "http://127.0.0.1:9",  # gRPC would ask it, and get no answer
                **named,
            },
        )
        for i, said in enumerate(words)
    ]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_process_is_named(tmp_path, how):
    pair = started_by_hand(tmp_path, *[f"lose 1 {how}"] * 2)
    _, err = end(pair[0])
    pair[1].kill()
    assert pair[0].returncode == 4, err
    lines = [line for line in err.splitlines() if line.startswith("dflop: ")]
    assert len(lines) == 1
    assert re.match(r"dflop: process 1 \(.*, pid \d+\) has been silent for \d s; the run", lines[0])
    assert "Check failure" not in err
    end(pair[1])


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_without_process_0_the_others_abort_with_their_stacks(tmp_path, how):
    pair = started_by_hand(tmp_path, *[f"lose 0 {how}"] * 2)
    _, err = end(pair[1])
    pair[0].kill()
    assert pair[1].returncode == -signal.SIGABRT, err
    assert "Fatal Python error: Aborted" in err
    end(pair[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_the_end_of_a_process_ends_the_other(tmp_path, failing):
    """Without a launcher, and without an abort by jax."""
    pair = started_by_hand(tmp_path, *[f"fail {failing}"] * 2)
    errs = [end(p)[1] for p in pair]
    assert [p.returncode for p in pair] == [6, 6], errs
    assert f"dflop: process {failing} ended with exit code 6" in errs[1 - failing]
    assert "Check failure" not in errs[0] + errs[1]


def errors_of(processes: list[Any]) -> list[str]:
    """What each process says, which ends by itself and not by an abort of jax."""
    errors = [end(p)[1] for p in processes]
    assert all(p.returncode in (1, 2, 4) for p in processes)
    return errors


SHORT = JOIN.replace("connect_timeout_s=60.0", "connect_timeout_s=2.0")
SHORT = SHORT.replace("plan_devices=4", "plan_devices=0")


def test_processes_that_do_not_come_are_told_in_a_line(tmp_path):
    for err in errors_of(started_by_hand(tmp_path, "leave", "leave", number=3, JOIN=SHORT)):
        assert "after 2 s, not all of the 3 processes have connected to 127.0.0.1:" in err
    first, second = started_by_hand(tmp_path, "leave", "leave", JOIN=SHORT)
    first.kill()
    (err,) = errors_of([second])
    assert "process 1 did not reach process 0 at 127.0.0.1:" in err
    assert "within 2 s (Connection refused)" in err
    end(first)


def test_processes_that_count_differently_are_told_in_a_line(tmp_path):
    text = SHORT.replace("connect_timeout_s=2.0", "connect_timeout_s=60.0")
    for err in errors_of(started_by_hand(tmp_path, "leave", "leave 3", JOIN=text)):
        version = jax.__version__
        assert f"process 1 is one of 3 processes of jax {version}, process 0 of 2 pr" in err


def test_a_port_in_use_is_told_in_a_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = f"127.0.0.1:{taken.getsockname()[1]}"
        (err,) = errors_of(started_by_hand(tmp_path, "leave", DFLOP_COORDINATOR=config))
    assert "process 0 cannot listen at 127.0.0.1:" in err
    assert "Address already in use; end its user, or" in err
