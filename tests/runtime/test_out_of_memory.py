"""How many bytes were missing, by XLA's words and by what devices say of themselves; and what a
program that memory does not hold gives."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax.runtime.out_of_memory import (
    OutOfMemory,
    TolerantPrograms,
    check_free_memory,
    is_out_of_memory,
    short_bytes,
)

KIB, GIB = 2**10, 2**30


def device(limit, used):
    stats = limit and {"bytes_limit": limit, "bytes_in_use": used}
    return SimpleNamespace(memory_stats=lambda: stats)


FREE_3_GIB = device(8 * GIB, 5 * GIB)
SILENT = device(None, 0)


@pytest.mark.parametrize("text, devices, missing", [
    (f"Out of memory while trying to allocate {4 * GIB} bytes.", [FREE_3_GIB], GIB),
    (f"Out of memory allocating {4 * GIB} bytes", [SILENT, FREE_3_GIB], GIB),
    (f"Out of memory allocating {4 * GIB} bytes", [SILENT], 0),
    (f"Out of memory allocating {GIB} bytes", [FREE_3_GIB], 0),  # in pieces too small
    ("Attempting to allocate 1.50G. That was not possible. There are 512.0K free.", [FREE_3_GIB],
     1.5 * GIB - 512 * KIB),
    ("Attempting to reserve 2.25GiB at the bottom of memory. That was not possible. There are "
     "1.25GiB free, 0B reserved", [], GIB),
    ("XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.5G of 15.5G "
     "hbm. Exceeded hbm capacity by 5.00G.", [], 5 * GIB),
    ("Failed to load in-memory CUBIN", [FREE_3_GIB], 0),
])  # fmt: skip
def test_bytes_that_were_missing(text, devices, missing):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")
    assert is_out_of_memory(error)
    assert short_bytes(error, devices) == missing


def test_other_errors_are_not_of_memory():
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no kernel image"))
    assert not is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED"))


def test_room_is_that_of_the_fullest_device():
    check_free_memory("it", 3 * GIB, [FREE_3_GIB, SILENT])
    check_free_memory("it", 99 * GIB, [SILENT])
    with pytest.raises(OutOfMemory, match="it needs") as error:
        check_free_memory("it", 4 * GIB, [device(8 * GIB, 0), FREE_3_GIB])
    assert is_out_of_memory(error.value)
    assert short_bytes(error.value, []) == GIB


def test_a_program_that_fails_in_a_rehearsal_gives_zeros_to_send():
    """Other processes count the transfers; a bug is an error all the same."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    struct = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=here)
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    errors = [full, jax.errors.JaxRuntimeError("INTERNAL: a bug")]

    def fails(*args):
        raise errors.pop(0)

    made = SimpleNamespace(reduced_structs=lambda: {"out": struct})
    programs = SimpleNamespace(program=lambda key: fails, updates={"llm": made})
    tolerant = TolerantPrograms(programs)
    got = tolerant.program(("llm", "reduce"))(1)
    np.testing.assert_array_equal(got["out"], np.zeros((2, 3), np.float32))
    assert tolerant.failed is full
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        tolerant.program(("llm", "update"))()
