"""Note SIGHUP while a server starts, before it has its handlers: the default would end the process.

A service manager reloads when it likes, also a server that has not read its fleet file yet.
"""

from __future__ import annotations

import signal
import threading

_noted = threading.Event()


def note_hangup() -> None:
    """Note SIGHUP from now on, in the main thread; nothing is done elsewhere. SIGUSR2, which
    restarts a server, does nothing to one that starts or ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, lambda number, frame: _noted.set())
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def take_hangup() -> bool:
    """Return whether SIGHUP came since the last call."""
    came = _noted.is_set()
    _noted.clear()
    return came
