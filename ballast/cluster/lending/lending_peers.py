"""Other workers that lend pages to this one or borrow from it, as this worker deals with them.

File descriptors of their memory are fetched beside the main thread, yet the device gets what each
lender sends in the order in which it was sent.
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
"""Attempts to fetch another worker's memory, after which it is considered unavailable."""


class LendingDevice(Protocol):
    """A device that may lend and borrow; all calls from any thread."""

    def post(self, event: Event) -> None: ...

    def export(self, pages: Sequence[int] = ()) -> Exported | None:
        """Return descriptors by which another process can map its pages; None: it lends none.

        Of a GPU these are the descriptors of `pages` alone.
        """

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        """Return the pages of a lease of which none has come back; empty: there is none."""

    def import_pages(self, exported: Exported) -> Exported:
        """Import pages of another GPU, and close their descriptors. Raises DeviceError."""

    def add_peer(self, peer: str, epoch: int, exported: Exported) -> None:
        """Note that pages can be lent between this device and a peer, whose memory this is."""

    def accept_lease(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        """Use pages that a GPU has lent, all of which are in `opened`."""


UseDevice = Callable[[], AbstractContextManager[LendingDevice | None]]
"""Holds the device, which stays as long as the context; None: there is none now."""


@dataclass(slots=True)
class _Peer:
    address: str
    thread: ThreadPoolExecutor
    """Handles its messages as a lender one after the other."""
    by_page: bool = False
    """Whether the descriptors of its pages come with each lease."""

    def submit(self, task: Callable[..., None], *arguments: object) -> None:
        self.thread.submit(task, *arguments).add_done_callback(_log_failure)


class LendingPeers:
    """The peers of one worker. All calls from the main thread, while the device may come and go."""

    def __init__(self, use_device: UseDevice, send: Callable[[LendingMessage], None]) -> None:
        """`send`: to the server, by any thread."""
        self.socket = PagesSocket()
        self._use_device, self._send = use_device, send
        self._peers: dict[str, _Peer] = {}

    def serve_pages(self) -> None:
        """Serve all workers that ask for pages of this device, each on a thread of its own."""
        for connection in self.socket.accept():
            arguments = (connection, self._export, self._offered)
            threading.Thread(target=serve_pages, args=arguments, daemon=True).start()

    def meet(self, message: MeetPeerMsg) -> None:
        """Fetch a peer's memory, beside the main thread, and have the device meet it."""
        known = self._peers[message.peer] = _Peer(message.address, ThreadPoolExecutor(1))
        known.submit(self._meet, known, message)

    def forget(self, message: PeerEndedMsg) -> None:
        """Tell the device that a peer has ended, after all messages from it as a lender."""
        event, known = (
            PeerGoneEvent(message.peer, message.epoch),
            self._peers.pop(message.peer, None),
        )
        if known is None:
            self._post(event)
            return
        known.submit(self._post, event)
        known.thread.shutdown(wait=False)

    def handle(self, event: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent) -> None:
        """Post a message about a lease to the device; of a lender, after those before it."""
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
        """Fetch the pages of a lease for the device; return a lease that cannot be had, of which
        the device need not know."""
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
