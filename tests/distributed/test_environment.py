"""What a process tells XLA and NCCL before jax starts: only what is known, never over the user."""

import os
import subprocess
import sys

import jax
import pytest

from dflop_jax.distributed import devices
from dflop_jax.distributed.devices import (
    cpu_environment,
    gpu_environment,
    is_xla_flag,
    set_xla_environment,
)
from dflop_jax.records import USABLE_MEMORY

FLAGS = "--xla_gpu_shard_autotuning=false --xla_gpu_enable_latency_hiding_scheduler=true"


def everything(_):
    return True


def test_all_is_set_where_nothing_is():
    assert gpu_environment({}, everything) == {
        "XLA_FLAGS": FLAGS,
        "XLA_CLIENT_MEM_FRACTION": str(USABLE_MEMORY),
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    }


@pytest.mark.parametrize("own", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_own_settings_win(own):
    mine = {
        own: ".5",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
        "XLA_FLAGS": "--xla_gpu_autotune_level=1 --xla_gpu_shard_autotuning=true",
    }
    found = gpu_environment(mine, everything)
    _, ours = FLAGS.split()
    assert found == {"XLA_FLAGS": f"{ours} {mine['XLA_FLAGS']}"}
    both = "--xla_gpu_shard_autotuning --xla_gpu_enable_latency_hiding_scheduler=false"
    assert gpu_environment({**mine, "XLA_FLAGS": both}, everything) == {}


def test_an_unknown_flag_is_left_out():
    assert "XLA_FLAGS" not in gpu_environment({}, lambda _: False)
    only = gpu_environment({}, lambda flag: "latency" in flag)["XLA_FLAGS"]
    assert only == FLAGS.split()[1]


def test_known_flags_are_those_that_xla_takes():
    """The libraries describe flags that are no more; naming one ends the process."""
    gone = "xla_gpu_enable_async_all_gather"
    assert not is_xla_flag("xla_gpu_no_such_flag")
    options = "CompileOptions().executable_build_options.debug_options"
    code = f"from jaxlib import xla_client; xla_client.{options}"
    for flag, known in ((gone, False), *((f, True) for f in devices.GPU_FLAGS)):
        assert is_xla_flag(flag) == known
        value = {**os.environ, "XLA_FLAGS": f"--{flag}=false"}
        run = subprocess.run([sys.executable, "-c", code], env=value, capture_output=True)
        assert (run.returncode == 0) == known


def test_on_the_cpu_programs_compile_quickly_where_jax_can():
    """jax 0.11 has no fusion emitters to turn off."""
    flags = "--xla_cpu_use_fusion_emitters=false", "--xla_backend_optimization_level=1"
    both, other = " ".join(flags), "--xla_a=1"
    assert cpu_environment({}, everything) == {"XLA_FLAGS": both}
    assert cpu_environment({"XLA_FLAGS": other}, everything) == {"XLA_FLAGS": f"{both} {other}"}
    own = "--xla_cpu_use_fusion_emitters=true"
    assert cpu_environment({"XLA_FLAGS": own}, everything) == {"XLA_FLAGS": f"{flags[1]} {own}"}
    assert is_xla_flag("xla_cpu_use_fusion_emitters") == (jax.__version_info__ < (0, 11))
    assert is_xla_flag("xla_backend_optimization_level")


def test_nothing_is_set_too_late(monkeypatch):
    before = dict(os.environ)
    monkeypatch.setattr(devices, "is_jax_initialized", lambda: True)
    for cpu in (True, False):
        monkeypatch.setattr(devices, "uses_cpu", lambda cpu=cpu: cpu)
        set_xla_environment()
    assert dict(os.environ) == before


def test_on_gpus_it_is_set_before_jax_starts(monkeypatch):
    monkeypatch.setattr(devices, "uses_cpu", lambda: False)
    monkeypatch.setattr(devices, "is_jax_initialized", lambda: False)
    for name in ("XLA_FLAGS", *devices.MEMORY_FRACTION_VARIABLES, *devices.NCCL_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_xla_environment()
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == str(USABLE_MEMORY)
    assert set(FLAGS.split()) <= set(os.environ["XLA_FLAGS"].split())
