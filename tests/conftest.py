"""8 CPU devices, strict arrays, and processes that stay small, for every test."""

import ctypes
import gc
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from .processes import CACHE

# What tests compile runs for milliseconds: XLA need not make it fast. In the environment, since the
# processes that tests start compile the same programs. Compiling the small LLM's backward takes
# 6.2 s without these flags, 4.0 with the first, 1.4 with the last too, which ended with jax 0.10; a
# nano model's programs take 2.1 s instead of 3.0 when each is compiled in one piece.
_QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_QUICK])

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Worker processes, whatever processes tests start, and later runs share what they compile.
_SHARED = {
    "jax_compilation_cache_dir": str(CACHE / "xla"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}
for _name, _value in _SHARED.items():
    jax.config.update(_name, _value)
    os.environ[_name.upper()] = str(_value)
# Without their bytecode at hand, processes spend a second on compiling Python.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# Tracing makes millions of objects that stay; looking for garbage among them takes a tenth of the
# time. `_clear` collects where a process has grown.
gc.set_threshold(1_000_000, 50, 1_000)

MOST_BYTES = 1_500_000_000  # from which on a test process drops what jax keeps
GROWTH_BYTES = 500_000_000  # after which it does so again, where it holds nearly as much without
_most_bytes = MOST_BYTES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since tests of several processes wait for each other; at most
    four, as each holds 8 devices of its own."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return min(4, cores + 1)


class _Failures:
    """Names a failed test at once: a suite that is cut off by a time limit prints no summary."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else report.longreprtext
            print(f"\n{report.nodeid} ({report.when}): {why[:300]}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Have the process that prints, not its workers, name failures."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures())


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--short`, which `make test` gives."""
    parser.addoption("--short", action="store_true", help="leave slow tests to `make check`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--short`, keep of a test marked `slow` its `first` cases, or none."""
    if not config.getoption("--short"):
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("slow")
        test = item.nodeid.split("[")[0]
        cases[test] += 1
        late = mark is not None and cases[test] > mark.kwargs.get("first", 0)
        (left_out if late else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected, which stays, out of every later collection."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real media beside the checkout; tests that need it skip without it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "dataset.json").exists():
        pytest.skip("no ../shared/data")
    return folder


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Runs of a file compile a layout once for its devices; model and optimizer are the same in all
    of them: as from the compilation cache, but traced once, too."""
    from dflop_jax.runtime.executor import Executor

    compile_all, compiled = Executor.compile, {}

    def compile_once(self, *args, **options):
        meshes = [s.mesh.devices.tolist() for s in self.programs.segments.values()]
        layout = f"{self.programs.layout} {meshes}"
        if layout not in compiled:
            compile_all(self, *args, **options)
            compiled[layout] = dict(self.programs.compiled)
        self.programs.compiled.update(compiled[layout])
        return len(compiled[layout])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "compile", compile_once)
        yield


@pytest.fixture(autouse=True)
def _stay_small() -> Iterator[None]:
    """Drop what tests have traced and compiled where a process has grown by it: jax keeps it all,
    gigabytes a worker. Not after every file: to look for garbage among all that is imported takes
    0.3 s, for each of 300 files, most of which compile nothing."""
    global _most_bytes
    yield
    if _held_bytes() > _most_bytes:
        _clear()
        _most_bytes = max(MOST_BYTES, _held_bytes() + GROWTH_BYTES)


def _held_bytes() -> int:
    """Memory of this process; where /proc does not tell, the most that it ever held."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _clear() -> None:
    jax.clear_caches()
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc alone
        ctypes.CDLL("libc.so.6").malloc_trim(0)
