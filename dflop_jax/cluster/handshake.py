"""How two processes prove to each other that they have the same secret, before either believes.

    host  -> guest   GREETING, a fresh nonce
    guest -> host    a fresh nonce, the hello's length, the hello, a proof
    host  -> guest   a proof; or REFUSAL, and the end of the connection

A proof is an HMAC-SHA256, under the secret, of both nonces and the hello, and of the side that
makes it. So a hello that was recorded proves nothing on another connection, neither side can be
made to prove for the other, and what a stranger sees of a proof says nothing about the secret. The
host reads no more than the largest hello before it believes, and reveals nothing but a nonce.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

GREETING = b"dflop/2\n"
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = 1024  # no hello is longer
REFUSAL = bytes(PROOF_BYTES)
_LENGTH = struct.Struct("!H")
_HEAD_BYTES = NONCE_BYTES + _LENGTH.size


class Refused(Exception):
    """What came is no proof of the secret; the message says in two words what it was."""


def prove(secret: bytes, side: bytes, host_nonce: bytes, guest_nonce: bytes, hello: bytes) -> bytes:
    """The proof of `side`, which is "host" or "guest"; the nonces have a fixed length."""
    message = b"dflop " + side + b"\0" + host_nonce + guest_nonce + hello
    return hmac.digest(secret, message, "sha256")


# ---- the host ----


@dataclass
class Challenge:
    """What a host asks of one connection, and what has come in answer."""

    secret: bytes = field(repr=False)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    came: bytes = b""

    @property
    def greeting(self) -> bytes:
        """What the host sends first."""
        return GREETING + self.nonce

    @property
    def wanted_bytes(self) -> int:
        """Bytes that are still missing, as far as is known.

        Raises:
          Refused: a longer hello is announced than there are.
        """
        if len(self.came) < _HEAD_BYTES:
            return _HEAD_BYTES - len(self.came)
        (length,) = _LENGTH.unpack(self.came[NONCE_BYTES:_HEAD_BYTES])
        if length > HELLO_BYTES:
            raise Refused("no hello")
        return _HEAD_BYTES + length + PROOF_BYTES - len(self.came)

    def answer(self) -> tuple[bytes, bytes]:
        """The hello that was proved, and the host's own proof; everything has come.

        Raises:
          Refused: whoever sent it has another secret, or repeats what another has sent.
        """
        assert self.wanted_bytes == 0
        nonce, hello = self.came[:NONCE_BYTES], self.came[_HEAD_BYTES:-PROOF_BYTES]
        expected = prove(self.secret, b"guest", self.nonce, nonce, hello)
        if not hmac.compare_digest(expected, self.came[-PROOF_BYTES:]):
            raise Refused("another secret")
        return hello, prove(self.secret, b"host", self.nonce, nonce, hello)


# ---- the guest ----


def introduce(sock: socket.socket, secret: bytes, hello: bytes, deadline: float) -> bool:
    """Prove the secret to the host at the other end and have it prove it; False if it hangs up.

    Raises:
      Refused: the other end is no host of dflop's, or has another secret.
    """
    assert len(hello) <= HELLO_BYTES
    greeting = _receive(
        sock, len(GREETING) + NONCE_BYTES, deadline, lambda came: GREETING.startswith(came[:8])
    )
    if not greeting:
        return False
    host_nonce, nonce = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    proof = prove(secret, b"guest", host_nonce, nonce, hello)
    try:
        sock.sendall(nonce + _LENGTH.pack(len(hello)) + hello + proof)
    except OSError:
        return False
    theirs = _receive(sock, PROOF_BYTES, deadline)
    if not theirs:
        return False
    if theirs == REFUSAL:
        raise Refused("another secret")
    if not hmac.compare_digest(theirs, prove(secret, b"host", host_nonce, nonce, hello)):
        raise Refused("no host")
    return True


def _receive(
    sock: socket.socket,
    n_bytes: int,
    deadline: float,
    plausible: Callable[[bytes], bool] = lambda came: True,
) -> bytes:
    """Exactly `n_bytes`, or nothing when the connection ends before.

    Raises:
      Refused: they are not plausible, or do not come in time.
    """
    came = b""
    while len(came) < n_bytes:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            part = sock.recv(n_bytes - len(came))
        except TimeoutError:
            raise Refused("no host") from None
        except OSError:
            return b""
        came += part
        if came and not plausible(came):
            raise Refused("no host")
        if not part:
            return b""
    return came
