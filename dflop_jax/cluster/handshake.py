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

GREETING = b"dflop/4\n"
# A proof is an HMAC of SHA-256, whole; a nonce is as long: none comes twice, nor can be guessed.
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = 1024  # no hello is longer
REFUSAL = bytes(PROOF_BYTES)
_LENGTH = struct.Struct("!H")


class Refused(Exception):
    """What came is no proof of the secret; the message says in two words what it was."""


def prove(secret: bytes, side: bytes, host_nonce: bytes, guest_nonce: bytes, hello: bytes) -> bytes:
    """The proof of `side`, which is "host" or "guest"; the nonces have a fixed length."""
    message = b"dflop " + side + b"\0" + host_nonce + guest_nonce + hello
    return hmac.digest(secret, message, "sha256")


def admit(sock: socket.socket, secret: bytes, deadline: float) -> bytes:
    """As the host, have the other end prove the secret, then prove it too; the hello it proved.

    Raises:
      Refused: whoever it is left, was too slow, has another secret, or repeats what it has heard.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        sock.sendall(GREETING + nonce)
        theirs = receive(sock, NONCE_BYTES, deadline)
        (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size, deadline))
        if length > HELLO_BYTES:
            raise Refused("no hello")
        hello = receive(sock, length, deadline)
        proof = receive(sock, PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, prove(secret, b"guest", nonce, theirs, hello)):
            sock.sendall(REFUSAL)
            raise Refused("another secret")
        sock.sendall(prove(secret, b"host", nonce, theirs, hello))
    except TimeoutError:
        raise Refused("too slow") from None
    except OSError:
        raise Refused("left early") from None
    return hello


def introduce(sock: socket.socket, secret: bytes, hello: bytes, deadline: float) -> None:
    """As a guest, prove the secret and the hello to the other end, and have it prove the secret.

    Raises:
      Refused: the other end is no host of dflop's, or has another secret.
      ConnectionError: it has hung up.
    """
    assert len(hello) <= HELLO_BYTES
    try:
        if any(receive(sock, 1, deadline)[0] != byte for byte in GREETING):
            raise Refused("no host")
        theirs, nonce = receive(sock, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
        proof = prove(secret, b"guest", theirs, nonce, hello)
        sock.sendall(nonce + _LENGTH.pack(len(hello)) + hello + proof)
        answer = receive(sock, PROOF_BYTES, deadline)
    except TimeoutError:
        raise Refused("no host") from None
    if answer == REFUSAL:
        raise Refused("another secret")
    if not hmac.compare_digest(answer, prove(secret, b"host", theirs, nonce, hello)):
        raise Refused("no host")


def receive(sock: socket.socket, n_bytes: int, deadline: float | None = None) -> bytes:
    """Exactly `n_bytes`, never more; ConnectionError when it ends before, TimeoutError too late."""
    came = bytearray()
    while len(came) < n_bytes:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        part = sock.recv(min(n_bytes - len(came), 1 << 20))
        if not part:
            raise ConnectionResetError("the other end hung up")
        came += part
    return bytes(came)
