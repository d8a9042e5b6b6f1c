"""What an operator's signals ask of a server."""

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
        """`restarts`: whether the process may be started again."""
        self._restarts = restarts
        self._again = False
        """Whether it is to be started again."""
        self.listener: socket.socket | None = None
        """What the process listens on until it has been started again; None: it is not to be."""
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
            signal.SIGTERM: self._once_more,
            signal.SIGINT: self._once_more,
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
            note_hangup()  # the process is not to end by one now, either

    def keep_listening(self, listener: socket.socket) -> bool:
        """Keep `listener` open if the process is to be started again: clients then wait. Returns
        whether it is."""
        if self._again:
            self.listener = listener.dup()
        return self._again

    def _restart(self) -> None:
        if not self.to_stop.is_set():
            self._again = True
            self.to_stop.set()

    def _once_more(self) -> None:
        self._again = False
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        (self.to_hurry if self.to_stop.is_set() else self.to_stop).set()
