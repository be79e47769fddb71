import os

from dflop_jax import child_processes
from dflop_jax.aot import chips, compiling
from tests.processes import running


def fake_compiler(monkeypatch, source):
    """Run a script in the place of the compiler's process."""
    for module in (compiling, chips):
        monkeypatch.setattr(module, "compiler_environment", lambda: dict(os.environ))
    monkeypatch.setattr(child_processes, "child_source", running(source))
