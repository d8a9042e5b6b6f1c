"""Test in a child process whether llguidance can use a grammar.

A client's grammar can keep llguidance busy for ever (patterns that intersect, terminals that
double) or overflow its stack, which ends the process. Here that process is the child of
`GrammarCheck`, and the client gets an error: the grammar is too complicated.
"""

from __future__ import annotations

import atexit
import hashlib
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import IO

from ballast.isolation.confinement import confine
from ballast.isolation.environment import child_environment

CPU_SECONDS = 0.3
"""Most processor time for one grammar, in seconds; the worker that runs its model will need as
much."""
MEMORY_BYTES = 2 << 30
_REMEMBERED = 4096
_LENGTH = 4

TOO_COMPLICATED = "it is too complicated"


class GrammarCheck:
    """Tests grammars in a child process, which starts when first needed. Safe from several threads.

    Results are cached: a conversation with tools sends the same ones with every turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def problem(self, grammar: str) -> str:
        """Return the problem with a grammar; empty: it can be used. Takes a millisecond, or at most
        `CPU_SECONDS`."""
        text = grammar.encode()
        key = hashlib.sha256(text).digest()
        with self._lock:
            found = self._known.pop(key, None)
            if found is None:
                found = self._asked(text)
            self._known[key] = found
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """End the child, which would otherwise end with this process."""
        with self._lock:
            self._end()

    def _asked(self, text: bytes) -> str:
        child = self._child
        if child is None or child.poll() is not None:
            child = self._child = _start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, text)
            return _received(child.stdout).decode()
        except (EOFError, BrokenPipeError):
            self._end()
            return TOO_COMPLICATED

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    )


def _send(pipe: IO[bytes], text: bytes) -> None:
    pipe.write(len(text).to_bytes(_LENGTH, "big") + text)
    pipe.flush()


def _received(pipe: IO[bytes]) -> bytes:
    """Read one message. Raises EOFError."""
    size = pipe.read(_LENGTH)
    text = pipe.read(int.from_bytes(size, "big")) if len(size) == _LENGTH else b""
    if len(size) < _LENGTH or len(text) < int.from_bytes(size, "big"):
        raise EOFError
    return text


def _child() -> None:
    """Test grammars until the parent is gone. The kernel ends this process where a grammar takes
    too much time or memory."""
    from llguidance import LLMatcher, LLTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    confine()
    tokenizer = LLTokenizer("byte")
    while True:
        grammar = _received(sys.stdin.buffer).decode()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails where no token is allowed; may be slow
        problem = matcher.get_error().partition("<state>")[0].strip()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, problem.encode())


CHECK = GrammarCheck()
atexit.register(CHECK.close)

if __name__ == "__main__":
    try:
        _child()
    except (EOFError, BrokenPipeError):
        sys.exit()
