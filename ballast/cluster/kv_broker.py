"""Own the KV store of a host in the server's process, and answer the workers that use it.

::

    worker ── names of a chain ───> broker ── tiers of its blocks ─────> worker
    worker ── blocks that filled ─> broker ── cells to write them to ──> worker copies, lands
    worker ── names to fetch ─────> broker ── cells to read them from ─> worker copies, releases

Workers map the store's memory and copy; the broker alone changes the directory, on the event loop.
When a worker dies, the kernel closes its connection: what it was writing is not listed, what it was
reading may make way, and all that it had stored stays for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Collection

import msgspec

from ballast.core.kv_tiers import KvTierSettings
from ballast.core.settings import KeySettings
from ballast.kv.tier_messages import (
    MOST_BYTES,
    MOST_RUNS,
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
    ToStore,
)
from ballast.kv.tier_shelf import KvBlock
from ballast.kv.tiered_store import TieredStore
from ballast.memory.cell_book import Runs
from ballast.memory.host_cells import HostCells

log = logging.getLogger(__name__)

LONGEST_STAGE = 30.0
"""Seconds for which a fetch waits for the disk."""


class KvBroker:
    """Answers workers on the event loop. Each connection owns what it reserves and fetches."""

    def __init__(self, store: TieredStore) -> None:
        assert isinstance(store.cells, HostCells), "workers map its memory"
        self.store, self._cells = store, store.cells
        self._open: dict[socket.socket, deque[bytes]] = {}
        """Connections, each with answers that its worker has had no room for yet."""
        self._decoder = msgspec.msgpack.Decoder(ToStore)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def of(cls, settings: KvTierSettings, keys: Collection[KeySettings] = ()) -> KvBroker | None:
        """Make a fleet's store, on the running event loop; None if it has none. `keys`: those whose
        KV on disk is kept. Raises DeviceError."""
        if not settings.host_bytes:
            return None
        post = asyncio.get_running_loop().call_soon_threadsafe
        return cls(TieredStore.create(settings, post, {key.name for key in keys}))

    def open(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection: the broker's, for `close`, and a worker's, which has
        the store's memory to receive."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        socket.send_fds(ours, [str(self._cells.n_bytes).encode()], [self._cells.fd])
        self._open[ours] = deque()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
        return ours, theirs

    def close(self, connection: socket.socket) -> None:
        """End a worker's connection; a second call does nothing."""
        if connection not in self._open:
            return
        del self._open[connection]
        asyncio.get_running_loop().remove_reader(connection.fileno())
        asyncio.get_running_loop().remove_writer(connection.fileno())
        connection.close()
        self.store.end(connection)

    def shut(self) -> None:
        """End all connections, and give the memory back."""
        for connection in list(self._open):
            self.close(connection)
        self.store.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MOST_BYTES)
            if not data:
                self.close(connection)
                return
            answer = self._answer(connection, self._decoder.decode(data))
            if answer is not None:
                self._send(connection, answer)
        except BlockingIOError:
            pass
        except ConnectionResetError:  # it ended before it had read all answers
            self.close(connection)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("a worker shares no KV any more: %s", error)
            self.close(connection)

    def _send(self, connection: socket.socket, answer: FromStore) -> None:
        self._open[connection].append(self._encoder.encode(answer))
        self._write(connection)

    def _write(self, connection: socket.socket) -> None:
        """Send what waits, as far as the worker takes it."""
        loop, waiting = asyncio.get_running_loop(), self._open[connection]
        try:
            while waiting:
                connection.send(waiting[0])
                waiting.popleft()
            loop.remove_writer(connection.fileno())
        except BlockingIOError:
            loop.add_writer(connection.fileno(), self._write, connection)
        except OSError:
            self.close(connection)

    def _answer(self, owner: socket.socket, message: ToStore) -> FromStore | None:
        store = self.store
        match message:
            case LookUpMsg():
                found = store.look_up(message.model, message.names)
                return FoundMsg(message.number, found)
            case FetchMsg():
                self._stage(owner, message)
            case ReserveMsg():
                return self._reserve(owner, message)
            case StagedMsg():
                store.occupy(owner, message.n_bytes)
            case ReleaseMsg():
                store.release(owner, message.names, message.corrupt)
            case LandMsg():
                for name, checksum in message.written:
                    if checksum is None:
                        store.abandon(owner, name)
                    else:
                        store.land(owner, name, checksum)
        return None

    def _stage(self, owner: socket.socket, message: FetchMsg) -> None:
        """Bring what is on disk to the host, then answer; a disk that hangs is not waited for."""
        late: list[asyncio.TimerHandle] = []
        answered = False

        def staged() -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._fetch(owner, message)
            for timer in late:
                timer.cancel()

        def hang() -> None:
            self.store.give_up_disk(f"it has not answered for {LONGEST_STAGE:.0f} seconds")
            staged()

        self.store.stage(message.model, message.names, staged)
        if not answered:
            late.append(asyncio.get_running_loop().call_later(LONGEST_STAGE, hang))

    def _fetch(self, owner: socket.socket, message: FetchMsg) -> None:
        """Answer a fetch, of which all that could be was brought to the host."""
        if owner not in self._open:
            return  # its worker has died meanwhile
        slots = self.store.fetch(owner, message.model, message.names)
        runs = n = 0
        while n < len(slots) and (runs := runs + len(slots[n].runs)) <= MOST_RUNS:
            n += 1
        if n < len(slots):
            self.store.release(owner, message.names[n : len(slots)])
        self._send(owner, SlotsMsg(message.number, tuple(slots[:n]), n < len(slots)))

    def _reserve(self, owner: socket.socket, message: ReserveMsg) -> ReservedMsg:
        cells: list[Runs | None] = []
        runs = 0
        for b in message.blocks:
            block = KvBlock(b.name, b.parent, b.n_bytes, message.model, b.tenant, b.seconds)
            (found,) = self.store.reserve(owner, (block,))
            runs += len(found or ())
            if runs > MOST_RUNS:
                if found is not None:
                    self.store.abandon(owner, block.name)
                break
            cells.append(found)
        return ReservedMsg(message.number, tuple(cells))
