"""Connect a worker to the KV store of its host, which the server's process owns.

Implements `live.kv_tiers.KvConnection`. Requests are sent without waiting; a thread takes the
answers. Where the server does not answer any more, all
requests get the empty answer: KV is computed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ballast.kv.directory import MISSING
from ballast.kv.host_store import Slot
from ballast.kv.tier_messages import (
    MOST_BLOCKS,
    MOST_BYTES,
    FetchMsg,
    FoundMsg,
    FromStore,
    LandMsg,
    LookUpMsg,
    ReleaseMsg,
    ReservedMsg,
    ReserveMsg,
    SlotsMsg,
    StagedMsg,
    StoredBlock,
    ToStore,
)
from ballast.kv.tier_shelf import KvBlock
from ballast.live.own_store import MappedCells
from ballast.memory.cell_book import Runs
from ballast.memory.share import receive

log = logging.getLogger(__name__)

_Answered = Callable[[Any], object]


class KvClient:
    """A worker's end of a `KvBroker`'s connection. Used by the device's loop and its copies."""

    def __init__(self, fd: int) -> None:
        """Own `fd`, the worker's end, from now on. Raises OSError."""
        self._connection = socket.socket(fileno=fd)
        size, fds = receive(self._connection, MOST_BYTES)
        try:
            cells = MappedCells(fds[0], int(size))
        finally:
            for received in fds:
                os.close(received)
        self.address, self.memory = cells.address, cells.memory
        self._decoder = msgspec.msgpack.Decoder(FromStore)
        self._lock = threading.Lock()
        """Held while the connection is found open and a callback is listed."""
        self._awaited: dict[int, _Answered] = {}
        """Callbacks of requests that have no answer yet, by number; called with None if none will
        come."""
        self._numbers = itertools.count(1)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def look_up(
        self, model: str, names: Sequence[bytes], answered: Callable[[str], object]
    ) -> None:
        found: list[str] = []

        def ask() -> None:
            at = MOST_BLOCKS * len(found)
            wanted = tuple(names[at : at + MOST_BLOCKS])
            self._ask(lambda number: LookUpMsg(number, model, wanted), take)

        def take(answer: FoundMsg | None) -> None:
            tiers = "" if answer is None else answer.tiers
            found.append(tiers.ljust(MOST_BLOCKS, MISSING))
            if answer is not None and MOST_BLOCKS * len(found) < len(names):
                ask()
            else:
                answered("".join(found).rstrip(MISSING))

        ask()

    def fetch(
        self, model: str, names: Sequence[bytes], answered: Callable[[Sequence[Slot]], object]
    ) -> None:
        slots: list[Slot] = []

        def ask() -> None:
            wanted = tuple(names[len(slots) : len(slots) + MOST_BLOCKS])
            self._ask(
                lambda number: FetchMsg(number, model, wanted),
                lambda answer: take(answer, len(wanted)),
            )

        def take(answer: SlotsMsg | None, n: int) -> None:
            came = () if answer is None else answer.slots
            slots.extend(came)
            more = answer is not None and (answer.more or len(came) == n)
            if came and more and len(slots) < len(names):
                ask()
            else:
                answered(slots)

        ask()

    def release(self, names: Sequence[bytes], corrupt: bytes = b"") -> None:
        for at in range(0, len(names), MOST_BLOCKS):
            self._tell(ReleaseMsg(tuple(names[at : at + MOST_BLOCKS]), corrupt))
            corrupt = b""

    def reserve(
        self, blocks: Sequence[KvBlock], answered: Callable[[Sequence[Runs | None]], object]
    ) -> None:
        stored = tuple(
            StoredBlock(b.name, b.parent, b.n_bytes, b.tenant, b.seconds) for b in blocks
        )

        def take(answer: ReservedMsg | None) -> None:
            answered(() if answer is None else answer.cells)

        self._ask(lambda number: ReserveMsg(number, blocks[0].model, stored), take)

    def land(self, written: Sequence[tuple[bytes, int | None]]) -> None:
        self._tell(LandMsg(tuple(written)))

    def occupy(self, n_bytes: int) -> None:
        self._tell(StagedMsg(n_bytes))

    def close(self) -> None:
        self._is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _ask(self, make: Callable[[int], ToStore], answered: _Answered) -> None:
        """Send a request without waiting. It is answered with None where that cannot be done."""
        number = next(self._numbers)
        data = msgspec.msgpack.encode(make(number))
        with self._lock:
            if self._is_open:
                self._awaited[number] = answered
                try:
                    self._connection.send(data, socket.MSG_DONTWAIT)
                    return
                except OSError:  # it is gone, or so busy that KV had better be computed
                    del self._awaited[number]
        answered(None)

    def _tell(self, message: ToStore) -> None:
        """Send a message that has no answer; waits for room in the socket."""
        with contextlib.suppress(OSError):
            self._connection.send(msgspec.msgpack.encode(message))

    def _run(self) -> None:
        try:
            while data := self._connection.recv(MOST_BYTES):
                answer = self._decoder.decode(data)
                self._awaited.pop(answer.number)(answer)
        except (OSError, msgspec.MsgspecError, KeyError) as error:
            log.warning("the host's KV store cannot be understood: %s", error)
        if self._is_open:
            log.warning("the host's KV store does not answer any more: KV is computed")
        with self._lock:
            self._is_open = False
            awaited, self._awaited = self._awaited, {}
        for answered in awaited.values():
            answered(None)
