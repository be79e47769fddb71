"""Whether devices compute alike: one program without collectives, on three devices at a time.

A device that computes wrong says nothing: its gradients are finite, and every loss after is another
one. Every `train.check_every` steps the same compiled program runs on three devices with the same
inputs, which move on by one each time, so that every device has its turns. Bits that differ are run
again: what is the same the second time is a device's persistent fault, what is not was transient.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dflop_jax.cluster.peers import Peers
from dflop_jax.config import TrainConfig

AT_ONCE = 3  # devices: the fewest of which a majority names one
_WIDTH, _LAYERS, _ROWS = 512, 4, 256  # of the program; it takes some ms of a CPU core
_KEY = "devices agree"
Runs = Callable[[jax.Device], bytes]  # the digest of what the program gives on a device


class Differing(msgspec.Struct, frozen=True):
    """Devices that gave other bits than the rest, by their place among all of the run.

    Attributes:
      devices: those in the minority; all that were compared, where none has one.
      kind: it happened again, or it did not.
    """

    devices: tuple[int, ...]
    kind: Literal["persistent", "transient"]


def chosen(n_devices: int, turn: int) -> tuple[int, ...]:
    """The devices whose turn it is: three in a row, of fewer all; of one the same twice."""
    if n_devices == 1:
        return (0, 0)
    return tuple((turn + i) % n_devices for i in range(min(AT_ONCE, n_devices)))


def minority(digests: Sequence[bytes]) -> tuple[int, ...]:
    """The places whose digest is not that of the majority; all, where none has more than half."""
    if len(set(digests)) <= 1:
        return ()
    usual, n = Counter(digests).most_common(1)[0]
    if 2 * n <= len(digests):
        return tuple(range(len(digests)))
    return tuple(i for i, d in enumerate(digests) if d != usual)


def check_one_kind(devices: Sequence[jax.Device], train: TrainConfig) -> None:
    """ValueError where a run would compare devices that need not compute alike."""
    kinds = sorted({d.device_kind for d in devices})
    asked = [n for n in ("check_every", "replay_skips") if getattr(train, n)]
    if asked and len(kinds) > 1:
        raise ValueError(
            f"train.{asked[0]} compares devices bit by bit, and those of this run are of several "
            f"kinds ({', '.join(kinds)}); train on one kind, or leave it out"
        )


@cache
def _program() -> Callable[..., jax.Array]:
    """Products, sums, exponentials and normalisations in float32 and bfloat16, forward and back."""

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            low = jnp.dot(h.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
            h = h + jax.nn.silu(low.astype(jnp.float32))
            return h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6), None

        h, _ = jax.lax.scan(layer, x, weights)
        scores = jax.nn.softmax(h @ h.T / jnp.sqrt(jnp.float32(_WIDTH)), axis=-1)
        return jnp.sum((scores @ h) ** 2)

    return jax.jit(jax.grad(layers, argnums=1))


@cache
def _inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_ROWS, _WIDTH)).astype(np.float32)
    weights = rng.standard_normal((_LAYERS, _WIDTH, _WIDTH)) / np.sqrt(_WIDTH)
    return x, weights.astype(np.float32)


def digest_on(device: jax.Device) -> bytes:
    """What the program gives on a device of this process."""
    out = _program()(*jax.device_put(_inputs(), device))
    return hashlib.sha256(np.asarray(out).tobytes()).digest()[:16]


class DeviceCheck:
    """Checks a run's devices, all processes together.

    Args:
      devices: of the whole run; each process runs the program on its own.
      runs: for tests.
    """

    def __init__(self, devices: Sequence[jax.Device], peers: Peers, runs: Runs = digest_on):
        self._devices, self._peers, self._runs = list(devices), peers, runs
        self._turn = 0

    def look(self) -> Differing | None:
        """Compare the devices whose turn it is; None: they agree. The same on every process."""
        at = chosen(len(self._devices), self._turn)
        self._turn += 1
        first = self._differing(at)
        if not first:
            return None
        again = self._differing(at)
        persists = set(first) & set(again)
        places = persists or set(first)
        named = dict.fromkeys(at[i] for i in sorted(places))
        return Differing(tuple(named), "persistent" if persists else "transient")

    def look_at_all(self) -> Differing | None:
        """Give every device its turn."""
        for _ in self._devices:
            if differing := self.look():
                return differing
        return None

    def warm_up(self) -> None:
        """Compile the program for this process's devices, so that no step waits for it."""
        for device in self._devices:
            if device.process_index == jax.process_index():
                self._runs(device)

    def names(self, differing: Differing) -> str:
        """The devices, in words."""
        at = (self._devices[i] for i in differing.devices)
        return ", ".join(f"device {d.id} of process {d.process_index}" for d in at)

    def process_of(self, differing: Differing) -> int | None:
        """The process whose devices alone differ; None where it is not one."""
        processes = {self._devices[i].process_index for i in differing.devices}
        return processes.pop() if len(processes) == 1 else None

    def _differing(self, at: Sequence[int]) -> tuple[int, ...]:
        """Places in `at` of devices in the minority."""
        here = jax.process_index()
        own = {
            i: self._runs(self._devices[d])
            for i, d in enumerate(at)
            if self._devices[d].process_index == here
        }
        gathered = self._peers.gather(_KEY, msgspec.msgpack.encode(own))
        answer = b""
        if self._peers.is_hub:
            decode = partial(msgspec.msgpack.decode, type=dict[int, bytes])
            digests: Mapping[int, bytes] = {i: d for g in gathered for i, d in decode(g).items()}
            answer = msgspec.msgpack.encode(minority([digests[i] for i in range(len(at))]))
        return msgspec.msgpack.decode(self._peers.share(_KEY, answer), type=tuple[int, ...])
