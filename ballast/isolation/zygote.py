"""Call functions in child processes with limits, forked from a prepared process (the zygote).

::

    this process          zygote                      child, one for each call
    call(f, x) ─────────> fork ─────────────────────> limits, f(x)
               <───────── value, or why there is none <─ value or error, as plain data

The zygote is forked from a process that has already imported the modules that calls need, and only
forks: so a call costs a fork, not the imports, and a child that hangs, takes all memory or crashes
ends alone. Arguments are pickled, since they come from this process; results are msgpack of the
type that the caller names, since the file that a child has read may have corrupted it. Children are
confined (`confinement`): code that a file makes them run reads files, and no more.
`weights.manifest.fork_zygote` makes the zygote in which workers read checkpoints.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ballast.core import errors
from ballast.core.errors import BallastError, BrokenPromise, DeviceError, LimitExceeded, brief
from ballast.isolation.calls import A, R
from ballast.isolation.confinement import confine
from ballast.isolation.limits import Limits
from ballast.isolation.orphan import die_with

NAME = "ballast-zygote"
"""Name of the zygote's process in listings."""
_LENGTH = struct.Struct("<Q")
_WARM_UP = b""
"""Message that asks for no call."""
_POLL_SECONDS = 1e-3
_MOST_BYTES = 1 << 30
"""Most bytes of an encoded result; a checkpoint's headers have at most a tenth of that."""


class Zygote:
    """Calls module-level functions in limited child processes, one call at a time.

    Safe from any thread; a context manager.
    """

    def __init__(self, channel: socket.socket, pid: int, limits: Limits) -> None:
        self._channel, self._pid, self._limits = channel, pid, limits
        self._lock = threading.Lock()
        """Held during a call."""
        self._closed = False

    @classmethod
    def fork(
        cls,
        prepare: Callable[[], object] = lambda: None,
        limits: Limits | None = None,
        *,
        confined: bool = True,
        warm_up: Callable[[], object] = lambda: None,
    ) -> Zygote:
        """Fork the zygote from this process as it is now; `prepare` runs first in each child.

        `confined` False: for calls that read nothing that others have written, and write files.
        `warm_up` runs in the zygote before its first call, whose children have what it imports.

        Other threads of this process must be waiting, not computing nor ending (`wait_for_exit`):
        the zygote has none of them, and a lock that one of them holds stays held there.
        """
        limits = limits or Limits()
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _serve(theirs, parent, _confining(prepare) if confined else prepare, limits, warm_up)
        theirs.close()
        return cls(ours, pid, limits)

    def call(self, function: Callable[[A], R], argument: A, result: type[R]) -> R:
        request = pickle.dumps((function.__module__, function.__qualname__, argument))
        with self._lock:
            try:
                _send(self._channel, request)
                reply = _receive(self._channel)
            except OSError as error:
                raise DeviceError(NAME, f"the process is gone: {error}") from error
        if reply is None:
            raise DeviceError(NAME, "the process is gone")
        return _opened(reply, result)

    def warm_up(self) -> None:
        """Have it import what calls need, and do not wait for that."""
        with self._lock:
            _send(self._channel, _WARM_UP)

    def close(self) -> None:
        """End the zygote, after the call in progress, if any. A second `close` does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._channel.close()
        os.waitpid(self._pid, 0)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def wait_for_exit(thread: threading.Thread) -> None:
    """Return once a thread that has been started has ended for the kernel as well.

    `join` returns before: what libraries do at a thread's end comes after Python's part of it. MKL
    frees the thread's buffers then under a lock, for which a process that was forked meanwhile
    spins for ever at its first matrix product.
    """
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(_POLL_SECONDS)


# -- messages -------------------------------------------------------------------------------------


class _Failure(msgspec.Struct):
    """An error in place of a result: its class in `core.errors`, message and attributes."""

    kind: str
    message: str
    attributes: dict[str, str | None]


def _opened(reply: bytes, result: type[R]) -> R:
    """Decode the result in a reply, or raise the error in it."""
    if reply[:1] == b"+":
        return msgspec.msgpack.decode(reply[1:], type=result, dec_hook=_path)
    failure = msgspec.msgpack.decode(reply[1:], type=_Failure)
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, BallastError)):
        raise DeviceError(NAME, failure.message)
    error = kind.__new__(kind, failure.message)
    error.__dict__.update(failure.attributes)
    raise error


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)


def _failure(error: BaseException) -> bytes:
    if isinstance(error, BallastError):
        attributes = {k: v if v is None else str(v) for k, v in vars(error).items()}
        failed = _Failure(type(error).__name__, str(error), attributes)
    else:
        failed = _Failure(BrokenPromise.__name__, brief(error), {})
    return b"-" + msgspec.msgpack.encode(failed)


def _length(message: bytearray) -> int:
    """Bytes of a message behind its header."""
    return int(_LENGTH.unpack_from(message)[0])


def _send(channel: socket.socket, message: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(message)))
    channel.sendall(message)


def _receive(channel: socket.socket) -> bytes | None:
    """Read one message; None if the other end is closed."""
    header = _exactly(channel, _LENGTH.size)
    found = None if header is None else _exactly(channel, _length(header))
    return None if found is None else bytes(found)


def _exactly(channel: socket.socket, n: int) -> bytearray | None:
    found = bytearray()
    while len(found) < n:
        part = channel.recv(min(n - len(found), 1 << 20))
        if not part:
            return None
        found += part
    return found


# -- the zygote -----------------------------------------------------------------------------------


def _serve(
    channel: socket.socket,
    parent: int,
    prepare: Callable[[], object],
    limits: Limits,
    warm_up: Callable[[], object],
) -> NoReturn:
    """Fork a child for each call until the other end is closed. Never returns: the process
    exits."""
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
        gc.freeze()  # objects of the parent must not be finalised here
        _keep_only(channel.fileno())
        Path("/proc/self/comm").write_text(NAME)
        warm = False
        while (request := _receive(channel)) is not None:
            if not warm:
                warm_up()
                gc.freeze()
                warm = True
            if request == _WARM_UP:
                continue
            _send(channel, _answer(request, channel, prepare, limits))
        code = 0
    finally:
        os._exit(code)


def _keep_only(kept: int) -> None:
    """Close all descriptors but `kept`; standard input and outputs become /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    # Objects that replaced them (captured output, say) may have lost their descriptors.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115


def _answer(
    request: bytes, channel: socket.socket, prepare: Callable[[], object], limits: Limits
) -> bytes:
    """Run one call in a child; returns its reply, or an error in its place."""
    reading, writing = os.pipe()
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        channel.close()
        _run(request, writing, zygote, prepare, limits)
    os.close(writing)
    ended_in_time = True
    try:
        reply = _reply(reading, channel, time.monotonic() + limits.seconds)
        ended_in_time = reply is not None
    finally:
        os.close(reading)
        if not ended_in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if reply:
        return reply
    if not ended_in_time:
        reason = f"it was not done after {limits.seconds:g} s"
    elif os.WIFSIGNALED(status):
        reason = limits.exceeded(signal.Signals(os.WTERMSIG(status)))
    else:
        reason = "its process ended without an answer"
    return _failure(LimitExceeded(reason))


def _reply(reading: int, channel: socket.socket, until: float) -> bytes | None:
    """Read the child's reply; empty: the child ended without a whole one, None: its time was up,
    the caller is gone, or the reply is too long."""
    found = bytearray()
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(channel, select.POLLRDHUP)
    while (left := until - time.monotonic()) > 0:
        ready = dict(poll.poll(left * 1000))
        if channel.fileno() in ready:
            return None  # the caller is gone
        if reading not in ready:
            continue
        part = os.read(reading, 1 << 20)
        found += part
        whole = len(found) >= _LENGTH.size and len(found) - _LENGTH.size == _length(found)
        if not part or whole:
            return bytes(found[_LENGTH.size :]) if whole else b""
        if len(found) > _MOST_BYTES:
            return None
    return None


def _run(
    request: bytes, writing: int, zygote: int, prepare: Callable[[], object], limits: Limits
) -> NoReturn:
    """Run the call in the child, and write the reply."""
    code = 1
    try:
        die_with(zygote)
        limits.apply()
        reply = _called(request, prepare, limits)
        with open(writing, "wb") as file:
            file.write(_LENGTH.pack(len(reply)))
            file.write(reply)
        code = 0
    finally:
        os._exit(code)


def _confining(prepare: Callable[[], object]) -> Callable[[], object]:
    """Return what confines a child, and then prepares it."""

    def ready() -> None:
        confine()
        prepare()

    return ready


def _called(request: bytes, prepare: Callable[[], object], limits: Limits) -> bytes:
    try:
        prepare()
        module, name, argument = pickle.loads(request)
        function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        return b"+" + msgspec.msgpack.encode(function(argument), enc_hook=str)
    except MemoryError:
        reason = limits.no_memory
    except BaseException as error:  # noqa: BLE001 - a panic of the tokenizers library is no Exception
        return _failure(error)
    # Outside of the handler, which keeps the function's memory alive.
    return _failure(LimitExceeded(reason))
