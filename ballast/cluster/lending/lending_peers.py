"""Fetch lent pages from peers, serve this worker's pages to them, and pass lease messages on.

Used by `Worker` on the main thread of the worker's process. File descriptors are fetched on one
thread per peer, so that the main thread never waits for them; the device still gets each lender's
messages in the order in which they were sent. Does not decide about leases: the device does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ballast.core.errors import DeviceError
from ballast.core.event import Event
from ballast.core.lease import (
    Lease,
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
)
from ballast.memory.vm import Exported
from ballast.transport.page_descriptors import PagesSocket, fetch_lease, fetch_pages, serve_pages
from ballast.transport.worker_messages.lending_messages import MeetPeerMsg, PeerEndedMsg

log = logging.getLogger(__name__)

FETCHES = 3
"""Attempts to fetch descriptors of another worker's memory before giving up."""


class LendingDevice(Protocol):
    """A device that may lend pages and borrow them; all calls from any thread."""

    def post(self, event: Event) -> None: ...

    def export(self, pages: Sequence[int] = ()) -> Exported | None:
        """Return descriptors by which another process can map its pages; None: it lends none.

        A GPU exports one descriptor for each of `pages`.
        """

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        """Return the pages of a lease of which none has been returned; empty: no such lease."""

    def import_pages(self, exported: Exported) -> Exported:
        """Import pages of another GPU, and close their descriptors. Raises DeviceError."""

    def add_peer(self, peer: str, epoch: int, exported: Exported) -> None:
        """Allow lending between this device and a peer. `exported`: the peer's memory."""

    def accept_lease(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        """Use the pages of a lease from a GPU, which have been imported as `opened`."""


UseDevice = Callable[[], AbstractContextManager[LendingDevice | None]]
"""Context in which the device stays alive; None: there is no device now."""


@dataclass(slots=True)
class _Peer:
    address: str
    thread: ThreadPoolExecutor
    """Single thread that handles the messages of this lender in order."""
    epoch: int
    by_page: bool = False
    """Whether descriptors are fetched per lease (GPU) instead of once for all pages (CPU)."""

    def submit(self, task: Callable[..., None], *arguments: object) -> None:
        self.thread.submit(task, *arguments).add_done_callback(_log_failure)


class LendingPeers:
    """Tracks the peers of one worker. All calls from the main thread; the device may not exist yet,
    or not any more."""

    def __init__(self, use_device: UseDevice, send: Callable[[LendingMessage], None]) -> None:
        """`send`: sends a message to the server; called by any thread."""
        self.socket = PagesSocket()
        self._use_device, self._send = use_device, send
        self._peers: dict[str, _Peer] = {}
        self._epoch = 0
        """Last epoch of a peer."""

    def serve_pages(self) -> None:
        """Accept connections of workers that fetch this device's pages; one thread serves each."""
        for connection in self.socket.accept():
            arguments = (connection, self._export, self._offered)
            threading.Thread(target=serve_pages, args=arguments, daemon=True).start()

    def meet(self, message: MeetPeerMsg) -> None:
        """Fetch descriptors of a peer's memory on the peer's thread, and add it to the device."""
        known = _Peer(message.address, ThreadPoolExecutor(1), message.epoch)
        self._peers[message.peer] = known
        self._epoch = max(self._epoch, message.epoch)
        known.submit(self._meet, known, message)

    def forget(self, message: PeerEndedMsg) -> None:
        """Post the end of a peer to the device, after all messages that the peer sent as lender."""
        event, known = (
            PeerGoneEvent(message.peer, message.epoch),
            self._peers.pop(message.peer, None),
        )
        if known is None:
            self._post(event)
            return
        known.submit(self._post, event)
        known.thread.shutdown(wait=False)

    def forget_all(self) -> int:
        """Post the end of all peers: the server that had introduced them is gone, and nothing of
        theirs is borrowed here. Returns the last epoch in which there was one."""
        for peer, known in list(self._peers.items()):
            self.forget(PeerEndedMsg(peer, known.epoch))
        return self._epoch

    def handle(self, event: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent) -> None:
        """Post a message about a lease to the device, in the order of its lender's messages."""
        known = self._peers.get(event.lease.lender)
        if known is None or isinstance(event, PagesReturnedEvent):
            self._post(event)
        else:
            known.submit(self._handle_from_lender, known, event)

    def _post(self, event: Event) -> None:
        with self._use_device() as device:
            if device is not None:
                device.post(event)

    def _export(self, pages: tuple[int, ...]) -> Exported:
        with self._use_device() as device:
            exported = None if device is None else device.export(pages)
        if exported is None:
            raise DeviceError("export", "this device lends no pages")
        return exported

    def _offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        with self._use_device() as device:
            return () if device is None else device.offered(borrower, epoch, lease)

    def _meet(self, known: _Peer, message: MeetPeerMsg) -> None:
        for _ in range(FETCHES):
            try:
                exported = fetch_pages(message.address)
                break
            except DeviceError as error:
                why = str(error)
        else:
            log.warning("no pages can be lent between this device and %s: %s", message.peer, why)
            return
        known.by_page = exported.page_fds is not None
        with self._use_device() as device:
            if device is not None:
                device.add_peer(message.peer, message.epoch, exported)

    def _handle_from_lender(self, known: _Peer, event: PagesLentEvent | PagesRecalledEvent) -> None:
        if isinstance(event, PagesLentEvent) and known.by_page:
            self._fetch(known.address, event.lease)
        else:
            self._post(event)

    def _fetch(self, address: str, lease: Lease) -> None:
        """Fetch the pages of a lease and give them to the device. If they cannot be fetched, return
        the lease to its lender without involving the device."""
        opened: list[Exported] = []

        def take(exported: Exported) -> None:
            with self._use_device() as device:
                if device is None:
                    raise DeviceError("import", "this device does not serve any more")
                opened.append(device.import_pages(exported))

        for _ in range(FETCHES):
            try:
                fetch_lease(address, lease, take)
                break
            except DeviceError as error:
                why = str(error)
                # If closing fails the pages cannot be returned: they will be recalled.
                _close(opened)
        else:
            log.warning("%d pages of %s cannot be used: %s", len(lease.pages), lease.lender, why)
            self._send(PagesReturnedEvent(lease))
            return
        with self._use_device() as device:
            if device is not None:
                device.accept_lease(lease, tuple(opened))


def _close(opened: list[Exported]) -> None:
    while opened:
        opened[-1].close()
        opened.pop()


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.error("what another worker said cannot be followed", exc_info=error)
