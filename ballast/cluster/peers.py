"""Other workers of the host, as one of them hears them: what comes by descriptor is fetched beside
the main thread, and what a lender says is told to the device in the order in which it was said."""

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
from ballast.transport.page_descriptors import PagesSocket, fetch_lease, fetch_pages, serve
from ballast.transport.worker_messages.lending_messages import MeetPeerMsg, PeerEndedMsg

log = logging.getLogger(__name__)

FETCHES = 3
"""Times that another worker is asked for its memory before it is taken to have none to lend."""


class Lends(Protocol):
    """A device; all from any thread."""

    def post(self, event: Event) -> None: ...

    def export(self, pages: Sequence[int] = ()) -> Exported | None:
        """So that another process can map its pages, of a GPU just these; None: it lends none."""

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        """Pages of a lease of which none has come back; none: there is no such lease."""

    def import_pages(self, exported: Exported) -> Exported:
        """Pages of another GPU, ready to be used; closes the descriptors. Raises DeviceError."""

    def add_peer(self, peer: str, epoch: int, exported: Exported) -> None: ...

    def accept_lease(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        """Pages of a GPU that have been lent to it: for all of them, by `open`."""


Use = Callable[[], AbstractContextManager[Lends | None]]
"""The device, which stays as long as the context; None: there is none now."""


@dataclass(slots=True)
class _Peer:
    address: str
    thread: ThreadPoolExecutor
    """In which everything that it says as a lender has its turn."""
    by_page: bool = False
    """Whether its pages come with each lease."""

    def do(self, task: Callable[..., None], *arguments: object) -> None:
        self.thread.submit(task, *arguments).add_done_callback(_tell_failure)


class Peers:
    """All calls from the main thread, while the device may come and go."""

    def __init__(self, use: Use, say: Callable[[LendingMessage], None]) -> None:
        """`say`: to the server, by any thread."""
        self.socket = PagesSocket()
        self._use, self._say = use, say
        self._peers: dict[str, _Peer] = {}

    def give(self) -> None:
        """Serve whoever wants pages of this device, each on a thread of its own."""
        for connection in self.socket.accept():
            arguments = (connection, self._export, self._offered)
            threading.Thread(target=serve, args=arguments, daemon=True).start()

    def meet(self, message: MeetPeerMsg) -> None:
        known = self._peers[message.peer] = _Peer(message.address, ThreadPoolExecutor(1))
        known.do(self._meet, known, message)

    def gone(self, message: PeerEndedMsg) -> None:
        """Told when nothing of what it had lent is about to be used here any more."""
        event, known = (
            PeerGoneEvent(message.peer, message.epoch),
            self._peers.pop(message.peer, None),
        )
        if known is None:
            self._post(event)
            return
        known.do(self._post, event)
        known.thread.shutdown(wait=False)

    def hear(self, word: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent) -> None:
        known = self._peers.get(word.lease.lender)
        if known is None or isinstance(word, PagesReturnedEvent):
            self._post(word)
        else:
            known.do(self._hear, known, word)

    def _post(self, event: Event) -> None:
        with self._use() as device:
            if device is not None:
                device.post(event)

    def _export(self, pages: tuple[int, ...]) -> Exported:
        with self._use() as device:
            exported = None if device is None else device.export(pages)
        if exported is None:
            raise DeviceError("export", "this device lends no pages")
        return exported

    def _offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        with self._use() as device:
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
        with self._use() as device:
            if device is not None:
                device.add_peer(message.peer, message.epoch, exported)

    def _hear(self, known: _Peer, word: PagesLentEvent | PagesRecalledEvent) -> None:
        if isinstance(word, PagesLentEvent) and known.by_page:
            self._fetch(known.address, word.lease)
        else:
            self._post(word)

    def _fetch(self, address: str, lease: Lease) -> None:
        """What does not come is returned: the device need not know."""
        opened: list[Exported] = []

        def take(exported: Exported) -> None:
            with self._use() as device:
                if device is None:
                    raise DeviceError("import", "this device does not serve any more")
                opened.append(device.import_pages(exported))

        for _ in range(FETCHES):
            try:
                fetch_lease(address, lease, take)
                break
            except DeviceError as error:
                why = str(error)
                # Where this fails the pages cannot be said to be back: they will be recalled.
                _close(opened)
        else:
            log.warning("%d pages of %s cannot be used: %s", len(lease.pages), lease.lender, why)
            self._say(PagesReturnedEvent(lease))
            return
        with self._use() as device:
            if device is not None:
                device.accept_lease(lease, tuple(opened))


def _close(opened: list[Exported]) -> None:
    while opened:
        opened[-1].close()
        opened.pop()


def _tell_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.error("what another worker said cannot be followed", exc_info=error)
