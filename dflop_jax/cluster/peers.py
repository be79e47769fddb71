"""Host-side messages among the processes of a run, and the watch over who is alive.

Processes are a tree (`tree`) whose root is process 0, the hub: each has a connection to its parent,
and to its children. Messages are bytes under a key. What the hub shares is passed on from parent to
child; what it gathers goes up together with what the children have sent, so that with thousands of
processes none sends or reads more than a few dozen messages. What the devices exchange goes another
way (`pipeline.communicator`): this carries schedules, counts, results and signs of life, from any
thread, without touching a device.

A connection that breaks, or stays silent for `timeout_s`, means a process that died or hangs. No
step can then end, so every process says which it was and ends. Nothing on that way waits without a
deadline: not for a lock, which a thread may hold that sends to a process that reads nothing any
more, nor for a connection.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import msgspec

from dflop_jax.cluster.ending import FAILED, SAY_S, TRY_AGAIN, RunFailed, TryAgain, end_now
from dflop_jax.cluster.links import BEAT, PeerLink
from dflop_jax.cluster.mail import Mail, Merge, Part

_FAILED, _BYE = "!failed", "!bye"
_CALLED = "?"  # begins the keys of `Peers.calls`
_REMEDY = "; the run ends, continue it with --resume auto"
LONGEST_BEAT_S = 1.0  # between two signs of life
BEATS_PER_TIMEOUT = 5  # at least; a short time-out has shorter beats
# A process that has missed so many beats when another is lost is named beside it. Two processes
# that hang for one reason differ by as much, so that long the first is held back.
QUIET_BEATS = 2.5
NOTICE_S = 1.0  # in which who reads finds that a connection has ended
ANNOUNCE_S = 1.0  # longest wait for those who are to be told of a failure
MOST_NAMES = 8  # in one line
MOST_WORDS = 4000  # characters of a reason; a message that long never waits in an empty buffer


class Peers:
    """The processes of a run, of which this is number `process`.

    With one process nothing is sent and nothing waits.

    Args:
      links: open connections, by process: to the parent, whose number is less than this one's, and
        to the children.
      timeout_s: silence after which a process counts as hung.
      on_failure: called, with a line that names the process and an exit code, instead of ending
        this one.
      clock: of this process, in seconds; what traces are in.
      remedy: what follows on the news that one is lost.
      names: what each is called; () for "process" and its number.

    Raises:
      TryAgain: a process has gone, or does not greet within `timeout_s`.
    """

    def __init__(
        self,
        process: int = 0,
        count: int = 1,
        links: Mapping[int, socket.socket] = MappingProxyType({}),
        *,
        timeout_s: float = 30.0,
        on_failure: Callable[[str, int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        remedy: str = _REMEDY,
        names: Sequence[str] = (),
    ):
        assert sum(p <= process for p in links) == (process > 0), (process, links)
        self.process, self.count = process, count
        self._timeout_s, self._remedy = timeout_s, remedy
        self._on_failure = on_failure or end_now
        # What is called, in a thread that reads, with the number of the process that tells and the
        # value of a message of such a key; it must not wait.
        self.calls: dict[str, Callable[[int, bytes], None]] = {}
        self._changed = threading.Condition()
        self._mail = Mail()
        self._closing = False
        self._failed = False
        self._told = False  # of the failure
        self._links = {
            p: PeerLink(p, s, p > process, clock, names[p] if names else "")
            for p, s in sorted(links.items())
        }
        self._children = [k for k in self._links.values() if k.process > process]
        self._parent = next((k for k in self._links.values() if k.process < process), None)
        self._merge = Merge(1 + len(self._children), self._pass_up)
        self._greet_all()
        for link in self._links.values():
            threading.Thread(
                target=self._read, args=(link,), daemon=True, name=f"peer-{link.process}"
            ).start()
        if links:
            threading.Thread(target=self._beat, daemon=True, name="peers-alive").start()

    @property
    def is_hub(self) -> bool:
        return self.process == 0

    # ---- messages ----

    def new_run(self) -> None:
        """Begin another run of the same processes: what is left of the one before is forgotten."""
        self._mail.new_run()
        self._merge.forget_all_but(self._mail.full(""))

    def abandon(self, prefix: str) -> None:
        """Whoever waits for a key that begins so, in this process, gets RunFailed instead."""
        self._mail.abandon(prefix)

    def share(self, key: str, value: bytes | None = None) -> bytes:
        """Process 0's `value`, on every process; the others wait for it."""
        if not self.is_hub:
            return self._mail.take(key)[0][1]
        assert value is not None, key
        self._pass_down(self._mail.full(key), value)
        return value

    def gather(self, key: str, value: bytes) -> list[bytes]:
        """Everybody's value, by process, on process 0, which waits; nothing on the others."""
        self._merge.add(self._mail.full(key), self.process, [(self.process, value)])
        return [v for _, v in sorted(self._mail.take(key))] if self.is_hub else []

    def sums(self, key: str, values: Sequence[float]) -> list[float]:
        """The sums of everybody's values, on every process."""
        # Not as JSON, which has no number for what is not finite.
        gathered = self.gather(key, msgspec.msgpack.encode(list(values)))
        rows = [msgspec.msgpack.decode(v, type=list[float]) for v in gathered]
        total = [sum(column) for column in zip(*rows, strict=True)]
        shared = self.share(key, msgspec.msgpack.encode(total))
        return msgspec.msgpack.decode(shared, type=list[float])

    def first_text(self, key: str, text: str) -> str:
        """The first process's text that is not empty, on every process; "" when all are."""
        texts = self.gather(key, text.encode())
        first = next((t for t in texts if t), b"")
        return self.share(f"{key}/first", first).decode()

    def barrier(self, key: str) -> None:
        """Wait until every process is here."""
        self.sums(key, ())

    @property
    def offset_s(self) -> float:
        """What to add now to this process's clock to get process 0's."""
        return self._parent.offset_s if self._parent else 0.0

    def tell_hub(self, key: str, value: bytes) -> None:
        """Have process 0 call what it keeps for a key (`calls`), with a short value."""
        assert self._parent is not None
        self._post([self._parent], key, msgspec.msgpack.encode((self.process, value)))

    def tell_all(self, key: str, value: bytes) -> None:
        """Have every process but this one, which is process 0, call what it keeps for a key."""
        self._post(self._children, key, msgspec.msgpack.encode((self.process, value)))

    # ---- the end ----

    def give_up(self, why: str) -> None:
        """End every process, this one as well, as if one were lost."""
        self._lost(why)

    def fail(self, why: str, exit_code: int = FAILED) -> bool:
        """Tell every process that this one stops, and why; they end with `exit_code`. Whether this
        is the first failure."""
        if first := self._fails_first():
            self._announce(why, exit_code)
            self._end_waits()
        else:
            self._await_end()
        return first

    def notice(self, seconds: float = NOTICE_S) -> None:
        """Before an error of this process's own is told: leave the threads that read so long to
        find that another is gone, by which the error may have come."""
        if self.count > 1:
            with self._changed:
                self._changed.wait_for(lambda: self._failed or self._closing, seconds)

    def close(self) -> None:
        """Leave together: after this a broken connection is no failure."""
        if self._closing or self._failed:
            return
        if self.count > 1:
            self.barrier(_BYE)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for link in self._links.values():
            link.close()

    # ---- meeting ----

    def _greet_all(self) -> None:
        """Learn the name of every process at the other end, and its clock."""
        # The others wait for those that their parent greets before, so they leave it time to say
        # who did not come.
        patience_s = self._timeout_s if self.is_hub else 2 * self._timeout_s
        deadline = time.monotonic() + patience_s
        for link in self._links.values():  # the parent first
            try:
                link.greet(deadline, lambda: self.offset_s)
            except TimeoutError:
                why = f"did not answer within {patience_s:g} s"
                raise TryAgain(f"{link.called} {why}{self._remedy}") from None
            except OSError:
                raise TryAgain(f"{link.called} died{self._remedy}") from None

    # ---- threads ----

    def _send(self, link: PeerLink, key: str, value: bytes) -> None:
        """Send a message of any length; where that waits for ever, `_beat` ends the run."""
        try:
            link.send(key, value)
        except OSError:
            if link.left:
                return
            self._lost(f"{link} died{self._remedy}", {link.process})
            self._await_end()
            raise RunFailed(
                f"sending {key!r} to process {link.process}: it has gone: start again"
            ) from None

    def _pass_down(self, key: str, value: bytes) -> None:
        for link in self._children:
            self._send(link, key, value)

    def _pass_up(self, key: str, part: Part) -> None:
        if self._parent is None:
            self._mail.put(key, part)
        else:
            self._send(self._parent, key, msgspec.msgpack.encode(part))

    def _read(self, link: PeerLink) -> None:
        """Thread: sort what arrives on a connection until it ends."""
        try:
            while True:
                key, value = link.receive()
                if key == _FAILED:
                    why, exit_code = msgspec.json.decode(value, type=tuple[str, int])
                    self._lost(why, exit_code=exit_code)
                elif key == BEAT:
                    link.compare(value)
                elif key.startswith(_CALLED):
                    self._call(link, key, value)
                else:
                    link.left |= key.endswith(_BYE)
                    with link.busy(), suppress(RunFailed):  # which is told by then
                        self._pass_on(link, key, value)
        except OSError:
            if not link.left:
                self._lost(f"{link} died{self._remedy}", {link.process})

    def _call(self, link: PeerLink, key: str, value: bytes) -> None:
        """Call what is kept for a key, if this process is meant and minds; pass it on without
        waiting."""
        beyond = self._children if link is self._parent else [self._parent] if self._parent else []
        if beyond:
            threading.Thread(target=self._post, args=(beyond, key, value), daemon=True).start()
        called = self.calls.get(key)
        if called and (link is self._parent or self.is_hub):
            called(*msgspec.msgpack.decode(value, type=tuple[int, bytes]))

    def _pass_on(self, link: PeerLink, key: str, value: bytes) -> None:
        """Give a message to this process, and to those beyond it."""
        if link is self._parent:
            self._pass_down(key, value)
            self._mail.put(key, [(0, value)])
        else:
            self._merge.add(key, link.process, msgspec.msgpack.decode(value, type=Part))

    def _beat(self) -> None:
        """Thread: give signs of life, and miss those of others."""
        every_s = min(LONGEST_BEAT_S, self._timeout_s / BEATS_PER_TIMEOUT)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or self._failed, every_s):
                    return
            if silent_s := self._silent_s(QUIET_BEATS * every_s):
                self._lost(f"{_silence(self._links, silent_s)}{self._remedy}", silent_s)
            for link in self._links.values():
                link.post(BEAT, link.sign(self.offset_s))

    def _silent_s(self, quiet_s: float) -> dict[int, float]:
        """Seconds of silence by process when one is lost, of all that are quiet; empty when none
        is lost."""
        now_s = time.monotonic()
        silent_s = {p: now_s - k.heard_s for p, k in self._links.items() if k.is_heard}
        patience_s = self._timeout_s + (quiet_s if len(silent_s) > 1 else 0.0)
        if max(silent_s.values(), default=0.0) <= patience_s:
            return {}
        return {p: s for p, s in silent_s.items() if s > quiet_s}

    def _lost(self, why: str, gone: Container[int] = (), exit_code: int = TRY_AGAIN) -> None:
        """End the run for a reason that is not this process's; `gone` are not waited for."""
        if self._fails_first():
            self._announce(why, exit_code, gone)
            self._on_failure(why, exit_code)  # does not return in a real run
            self._end_waits()

    def _fails_first(self) -> bool:
        """Whether nothing has failed before, nor has the run ended."""
        with self._changed:
            first = not (self._closing or self._failed)
            self._failed = self._failed or first
        return first

    def _announce(self, why: str, exit_code: int, gone: Container[int] = ()) -> None:
        """Tell every process that can hear it."""
        message = msgspec.json.encode((why[:MOST_WORDS], exit_code))
        self._post(list(self._links.values()), _FAILED, message, gone)

    def _post(
        self, links: list[PeerLink], key: str, message: bytes, gone: Container[int] = ()
    ) -> None:
        """Send a short message to whoever reads it within `ANNOUNCE_S`; `gone` are not waited
        for."""
        deadline = time.monotonic() + ANNOUNCE_S
        while links := [k for k in links if not k.post(key, message)]:
            links = [k for k in links if k.process not in gone]
            if time.monotonic() > deadline:
                return
            time.sleep(ANNOUNCE_S / 100)

    def _end_waits(self) -> None:
        self._mail.end()
        with self._changed:
            self._told = True
            self._changed.notify_all()

    def _await_end(self) -> None:
        """Leave another thread, which was first, the time to end this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._told or self._closing, ANNOUNCE_S + 2 * SAY_S)


def _silence(links: Mapping[int, PeerLink], silent_s: Mapping[int, float]) -> str:
    """Who is silent, in words, the longest first."""
    longest = sorted(silent_s, key=lambda p: (-silent_s[p], p))
    named = [f"{links[p]} is silent for {silent_s[p]:.0f} s" for p in longest[:MOST_NAMES]]
    more = [f"{n} more are silent"] if (n := len(longest) - MOST_NAMES) > 0 else []
    return ", ".join([*named, *more])
