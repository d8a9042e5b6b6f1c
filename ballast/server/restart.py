"""Restart a server in place: its process gets the program anew, and keeps what it listens on and
the weights that it has loaded.

    SIGUSR2 ─> drain ─> end the workers ─> execve(the same command) ─> start, with the same segments
                        clients that connect meanwhile wait in the listening socket's queue

The process id stays. Weights are kept where they are surely those that a start would read: sealed,
loaded by this very code from files that have not changed. What is handed over is a list of
descriptors in a sealed file, whose descriptor an environment variable names.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from ballast.cluster.handed_weights import HandedWeights, is_sealed
from ballast.weights.sealed import SEALS

log = logging.getLogger(__name__)

VARIABLE = "BALLAST_HANDED"
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


class RestartHandover(msgspec.Struct):
    """What a server hands to the one that takes its place."""

    code: str
    """`code_digest` of the one that hands it over."""
    listener: int
    weights: HandedWeights


def code_digest() -> str:
    """Return a hex digest of what decides how weights are laid out: this code and the libraries, as
    they lie on disk now."""
    package = Path(__file__).parents[1]
    files = [(str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in package.rglob("*.py")]
    versions = [importlib.metadata.version(name) for name in _LIBRARIES]
    return hashlib.sha256(repr((sorted(files), versions, sys.version)).encode()).hexdigest()


def received(code: str) -> RestartHandover | None:
    """Take over what the server before this one left in this process; None: there was none. Without
    weights if its code was another."""
    named = os.environ.pop(VARIABLE, "")
    signal.setitimer(signal.ITIMER_PROF, 0)  # the watchdog's, which outlives the program
    if not named.isdecimal():
        return None
    try:
        with open(int(named), "rb") as file:
            if not is_sealed(file.fileno()):
                raise ValueError("it is not sealed")
            handed = msgspec.msgpack.decode(file.read(), type=RestartHandover)
        for fd in (handed.listener, *handed.weights.descriptors):
            os.set_inheritable(fd, False)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("nothing is kept over the restart: %s", error)
        return None
    if handed.code != code:
        log.warning("weights are read anew: the code is another than before the restart")
        handed.weights.close()
        handed.weights = HandedWeights()
    return handed


def start_again(handed: RestartHandover) -> NoReturn:
    """Replace this process's program by the same command, which takes over what is handed."""
    table = os.memfd_create("ballast handed", os.MFD_ALLOW_SEALING)
    os.write(table, msgspec.msgpack.encode(handed))
    os.lseek(table, 0, os.SEEK_SET)
    fcntl.fcntl(table, fcntl.F_ADD_SEALS, SEALS)
    for fd in (table, handed.listener, *handed.weights.descriptors):
        os.set_inheritable(fd, True)
    os.environ[VARIABLE] = str(table)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is noted again; the file is read anyway
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def listener_of(handed: RestartHandover | None, host: str, port: int) -> socket.socket | None:
    """Return the socket that the server before this one listened on, if it is at this address;
    `port` 0: any. None: there is none."""
    if handed is None:
        return None
    listener = socket.socket(fileno=handed.listener)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
    here = listener.getsockname()
    if here[0] == found[0] and port in (0, here[1]):
        return listener
    listener.close()
    return None
