"""Programs that are loaded before they are traced: the same bits, and never another program's."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.pipeline import fingerprint as walk
from dflop_jax.pipeline.compiling import jobs
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.fingerprint import UnknownPart, fingerprint
from dflop_jax.train import compile_cache, program_index, surroundings
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.program_index import ProgramIndex
from models import layers as models_layers

from ..pipeline import plain
from ..small import Small

TRAIN = TrainConfig(steps=5, ema=0.5)
# Tensors are split, so that backward is lowered from the compiled forward.
MESHES = (0, 1, 1, 2), (2, 1, 3, 2)
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@pytest.fixture
def known_model(monkeypatch):
    """The small model's code counts as this project's; files are as old as they were."""
    monkeypatch.setattr(walk, "_KNOWN", walk._KNOWN | {"tests"})
    monkeypatch.setattr(surroundings, "_BEGAN_S", math.inf)
    monkeypatch.setattr(
        compile_cache.compilation_cache, "get_executable_and_time", compile_cache._noted_read
    )


@pytest.fixture
def lowered():
    """What is lowered meanwhile."""
    events = []

    def note(event, _seconds, **_more):
        if event == LOWERED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


def executor(model=None, train=TRAIN, **options) -> Executor:
    model = model or Small()
    plan = plain.plan_of(model, *MESHES)
    return Executor(model, plan, make_optimizer(train), **options)


def names(index: ProgramIndex, **options) -> dict:
    ex = executor(**options)
    try:
        return {key: index.name(job) for key, job in jobs(ex.programs).items()}
    finally:
        ex.close()


def after_a_step(ex: Executor) -> list[bytes]:
    samples = plain.random_samples(ex.model, 12, 1, max_tiles=1)
    schedule = plain.random_schedule(ex.plan, samples, 2, 2)
    arrays = plain.pack(ex.model, ex.plan, schedule, samples)
    result = ex.run_step(schedule, arrays, plain.scales_of(arrays)).result()
    state = ex.state.params, ex.state.masters, ex.state.opt_state, result.sums
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(state)]


def test_a_loaded_start_lowers_nothing_and_gives_the_same_bits(
    known_model, tmp_path, lowered, caplog
):
    def start() -> tuple[int, int, int, list[bytes]]:
        ex, index = executor(), ProgramIndex(tmp_path)
        ex.init(0)
        lowered.clear()
        n = ex.compile(known=index)
        n_lowered = len(lowered)
        try:
            return n, index.n_loaded, n_lowered, after_a_step(ex)
        finally:
            ex.close()

    n, n_loaded, n_lowered, bits = start()
    assert n_loaded == 0
    assert n_lowered == n
    again = start()
    assert again[:3] == (n, n, 0)
    assert again[3] == bits
    # One that is damaged is named and made again, backward's forward too; the rest is loaded.
    files = sorted((tmp_path / "programs").iterdir())
    for file in files[::2]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    third = start()
    assert third[1] == n - len(files[::2])
    assert third[3] == bits
    assert caplog.text.count("how to call a program is damaged; it is compiled again") == len(
        files[::2]
    )
    assert start()[2] == 0


def test_a_program_that_the_cache_has_no_more_is_traced(known_model, tmp_path, monkeypatch):
    index = ProgramIndex(tmp_path)
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    job = partial(_twice, struct)
    compiled = index.compile(index.name(job), job())
    devices = [jax.devices()[0]]
    assert index.load(index.name(job), devices)(np.ones(3, np.float32)).tolist() == [2.0] * 3
    assert compiled(np.ones(3, np.float32)).tolist() == [2.0] * 3
    gone = "get_executable_and_time"
    monkeypatch.setattr(program_index.compilation_cache, gone, lambda *_: (None, None))
    assert index.load(index.name(job), devices) is None
    monkeypatch.setattr(program_index.compilation_cache, gone, lambda *_: 1 / 0)
    assert index.load(index.name(job), devices) is None


def _twice(struct):
    return jax.jit(lambda x: x + x).lower(struct)


def test_whatever_a_program_depends_on_is_in_its_name(known_model, tmp_path, monkeypatch):
    def now(**options) -> dict:
        return names(ProgramIndex(tmp_path), **options)

    def differing(other: dict) -> set:
        assert other.keys() == first.keys()
        return {key[-1] for key in first if first[key] != other[key]}

    first = now()
    everything = {key[-1] for key in first}
    assert all(first.values())
    # Those of other segments, shapes and kinds are others.
    assert len(set(first.values())) == len(first)
    assert differing(now()) == set()
    for other in (replace(TRAIN, learning_rate=3e-4), replace(TRAIN, ema=0.25),
                  replace(TRAIN, weight_decay=0.3), replace(TRAIN, steps=6)):  # fmt: skip
        assert {"update"} <= differing(now(train=other)) <= {"update", "reduce"}
    assert {"update"} <= differing(now(clip_norm=1.0)) <= {"update", "reduce"}
    assert differing(now(freeze=("connector",))) - {"update", "reduce"}
    on_others = now(devices=jax.devices()[::-1])
    assert differing(on_others) == everything
    deeper = now(model=Small(n_layers=5))
    ours = {key: name for key, name in first.items() if key[0] != "vision"}
    assert ours
    assert not set(ours.values()) & set(deeper.values())
    with jax.default_matmul_precision("bfloat16"):
        assert differing(now()) == everything
    for holder, name, value in (
        (surroundings, "_sources", lambda: ("other", 0.0)),
        (surroundings, "_versions", lambda: ("other",)),
        (surroundings, "_processor", lambda: "other"),
        (surroundings, "_scripts", lambda: ["other"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            assert differing(now()) == everything
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert differing(now()) == everything


def test_nothing_is_known_where_the_code_may_be_another(known_model, tmp_path, monkeypatch):
    job = partial(_twice, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert ProgramIndex(tmp_path).name(job)
    with monkeypatch.context() as patch:
        patch.setattr(walk, "_KNOWN", walk._KNOWN - {"tests"})
        assert ProgramIndex(tmp_path).name(job) == ""
    with monkeypatch.context() as patch:  # a script's function in the place of a model's
        patch.setattr(models_layers, "another", _twice, raising=False)
        patch.setattr(surroundings, "_INSTALLED", "/nowhere")
        space = SimpleNamespace(__name__="script", __file__="/home/a/script.py")
        assert surroundings._is_elsewhere(space.__name__, space.__file__)
        assert ProgramIndex(tmp_path).name(job) == ""
    with monkeypatch.context() as patch:  # a file that was written after this process began
        patch.setattr(surroundings, "_BEGAN_S", 0.0)
        assert ProgramIndex(tmp_path).name(job) == ""
    assert ProgramIndex(tmp_path).name(job)


def test_every_byte_of_the_source_counts(tmp_path, monkeypatch):
    package = tmp_path / "some_package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    file = package / "code.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(surroundings, "SOURCES", ("some_package",))
    seen = set()
    for text in ("x = 1\n", "x = 2\n", "x = 2\n\n"):
        file.write_text(text)
        digest, newest_s = surroundings._sources.__wrapped__()
        seen.add(digest)
        assert newest_s >= file.stat().st_mtime
    file.rename(package / "other.py")
    seen.add(surroundings._sources.__wrapped__()[0])
    assert len(seen) == 4


def _closed(value, default=0):
    def inside(x, more=default):
        return x * value + more

    return inside


def test_values_have_one_word_each(known_model):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",))
    sharding = [jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*s)) for s in ((), "a")]
    ours = {}
    ours["self"] = ours
    values = [
        None, True, 1, 1.0, "1", b"1", (), [], {}, (1,), [1], ((1,), 2), (1, (2,)), {"a": 1},
        {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, frozenset({1, 2}), frozenset({1, 3}),
        0.1, np.float32(0.1), np.zeros(2), np.zeros(2, np.float32), np.zeros((2, 1)), np.ones(2),
        jnp.ones(2), jnp.zeros(2), np.dtype("float32"), jnp.bfloat16, jnp.tanh, jnp.sin,
        _closed(1), _closed(2), _closed(1, 2), partial(_closed, 1), partial(_closed, value=1),
        lambda x: x, TRAIN, replace(TRAIN, steps=6), Small(), Small(tied=False), ours,
        jax.nn.initializers.normal(0.1), jax.nn.initializers.normal(0.2), *sharding,
        jax.ShapeDtypeStruct((2,), np.float32), jax.ShapeDtypeStruct((2,), np.int32),
        jax.ShapeDtypeStruct((2,), np.float32, sharding=sharding[0]),
        jax.ShapeDtypeStruct((2,), np.float32, sharding=sharding[1]), jax.devices()[1],
    ]  # fmt: skip
    words = [fingerprint(v) for v in values]
    assert len(set(words)) == len(values)
    assert [fingerprint(v) for v in values] == words
    assert fingerprint(_closed(1)) == fingerprint(_closed(1))
    assert fingerprint(frozenset({2, 1})) == fingerprint(frozenset({1, 2}))
    assert fingerprint(1, 2) != fingerprint(12)


@pytest.mark.parametrize("value", [SimpleNamespace(a=1), iter([1]), jax.random.key(0),
                                   np.array([None]), pytest.raises])  # fmt: skip
def test_what_is_not_known_has_no_word(value):
    with pytest.raises(UnknownPart):
        fingerprint((1, [value]))
