"""Queue the messages and outputs that a worker will send, from all its threads, in order.

Filled by the device's thread and the peers' threads, emptied by `Worker` on the main thread.
"""

from __future__ import annotations

import contextlib
import os
import queue

from ballast.core.event import Output
from ballast.transport.worker_messages.codec import ToServer
from ballast.transport.worker_messages.request_messages import OutputsMsg


class OutgoingQueue:
    """Queue that any thread fills without waiting and the main thread empties."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToServer | list[Output]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when something was put in, or after `wake`."""

    def put(self, item: ToServer | list[Output]) -> None:
        """Queue a message, or outputs of requests."""
        self._queue.put(item)
        self.wake()

    def wake(self) -> None:
        """Make `fd` readable, so that the main thread wakes up."""
        os.eventfd_write(self.fd, 1)

    def drain(self) -> list[ToServer]:
        """Return all queued messages, in order; neighbouring outputs are joined in one message."""
        with contextlib.suppress(BlockingIOError):  # nothing was put in since the last time
            os.eventfd_read(self.fd)
        messages: list[ToServer] = []
        outputs: list[Output] = []
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, list):
                outputs += item
                continue
            if outputs:
                messages.append(OutputsMsg.of(outputs))
                outputs = []
            messages.append(item)
        if outputs:
            messages.append(OutputsMsg.of(outputs))
        return messages
