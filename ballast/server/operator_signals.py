"""Handle an operator's signals: stop, stop at once, reload the fleet file, restart.

Used by `serve`, which waits for the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

from ballast.isolation.hangup import note_hangup, take_hangup


class OperatorSignals:
    """Events that the operator's signals set: stop (first SIGTERM or SIGINT), stop now (second),
    read the fleet file again (SIGHUP), stop and start again (SIGUSR2)."""

    def __init__(self, *, restarts: bool = False) -> None:
        """`restarts`: whether SIGUSR2 starts the process again."""
        self._restarts = restarts
        self.restarting = False
        """Whether the process is started again once it has drained."""
        self.listener: socket.socket | None = None
        """Listening socket that stays open over a restart; None: no restart."""
        self.to_stop = asyncio.Event()
        self.to_hurry = asyncio.Event()
        self.to_reload = asyncio.Event()

    @contextlib.contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handle these signals in the `with` block, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._stop,
            signal.SIGINT: self._stop,
            signal.SIGHUP: self.to_reload.set,
        }
        if self._restarts:
            handlers[signal.SIGUSR2] = self._restart
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        if take_hangup():
            self.to_reload.set()
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
            note_hangup()  # SIGHUP must not end the process from here on

    def keep_listening(self, listener: socket.socket) -> bool:
        """Keep a copy of `listener` open over a restart, so that new clients wait. Returns whether
        there is a restart."""
        if self.restarting:
            self.listener = listener.dup()
        return self.restarting

    def _restart(self) -> None:
        if not self.to_stop.is_set():
            self.restarting = True
            self.to_stop.set()

    def _stop(self) -> None:
        self.restarting = False
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        (self.to_hurry if self.to_stop.is_set() else self.to_stop).set()
