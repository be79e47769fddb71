"""Which processes may time programs at once."""

import jax

from dflop_jax.train.profiling import _compute_apart


class Hub:
    """Process 0 of several; the others say what they are given."""

    def __init__(self, *others):
        self.others = others

    def gather(self, key, value):
        return [value, *self.others]

    def broadcast(self, key, value):
        return value


def test_processes_compute_apart_unless_they_share_a_core(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert _compute_apart(devices, Hub())
    assert _compute_apart(devices, Hub(b'["here/4"]', b'["there/3"]'))
    assert not _compute_apart(devices, Hub(b'["here/2", "here/3"]'))
