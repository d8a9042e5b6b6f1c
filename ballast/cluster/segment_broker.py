"""Share host-memory segments of weights between the workers of a host, each distinct one once.

::

    worker ── origin of a segment ─> broker ── unknown, or: its digest and memfd ──────────> worker
    worker ── digest and memfd ────> broker ── keep yours, or: memfd of an equal segment ──> worker

When a worker has died, the segments of the models that it served are kept for the worker that takes
its place (`KeptModels`): that one serves the same weights, whatever has become of their files.

`SegmentBroker` runs in the server's process, `SegmentClient` in each worker, for its host tier. The
broker maps no segment: it keeps a descriptor of each while a worker holds it. Segments are sealed,
so that no worker can change weights that others compute with; if some device is a GPU, they are
sealed against changes of size only (`HostTier.writable`). Workers query the broker for which of the
two applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from ballast.cluster.handed_weights import HandedModel, HandedWeights, is_sealed
from ballast.cluster.kept_models import KeptModel, KeptModels
from ballast.core.link import LinkSettings
from ballast.core.settings import ModelSettings
from ballast.memory.share import receive
from ballast.memory.shared_pace import HostLinkMemory
from ballast.weights.source_files import identity
from ballast.weights.tokenizer_files import digest_of

log = logging.getLogger(__name__)

_FIND, _SHARE, _RELEASE = b"f", b"s", b"r"
_SEALS = b"w"
"""Request: are segments writable once they are filled?"""
_MAP = b"m"
"""Request: a segment by its digest."""
_MODEL_KNOWN, _MODEL_FIND, _MODEL_KEEP, _MODEL_FORGET = b"?", b"F", b"K", b"R"
"""Requests about models: is it kept; its record; keep it; it is served here no longer."""
_MODEL_BRING = b"B"
"""Request: bring a model from another host."""
_OF_MODELS = (_MODEL_KNOWN, _MODEL_FIND, _MODEL_KEEP, _MODEL_FORGET, _MODEL_BRING)
_KEEP, _TAKE, _REFUSED = b"k", b"t", b"x"
_SEALED, _WRITABLE = b"s", b"w"
_DIGEST = 64
"""Characters of a digest in hex, and of an origin."""
_LONGEST = 256
"""Bound of a message, bytes."""


@dataclass(slots=True)
class _Held:
    fd: int
    holders: set[object] = field(default_factory=set)


class OtherHosts(Protocol):
    """Other hosts, which may keep models that this one does not."""

    async def bring(self, model: str, kind: str, listing: str) -> None:
        """Bring a model of a kind here, as `SegmentExchange.bring_model`, if one keeps it; raises
        nothing."""

    def changed(self, model: str, kind: str, kept: bool) -> None:
        """Note that a model is kept here from now on, or is no longer."""


class SegmentBroker:
    """Tracks which worker holds which segment, with a descriptor of each, on the event loop."""

    def __init__(self, writable: bool = False) -> None:
        """`writable`: whether workers leave segments writable, as `HostTier.writable`."""
        self._writable = writable
        self._held: dict[str, _Held] = {}
        self._digests: dict[str, str] = {}
        """Digest of each held segment, by origin."""
        self.models = KeptModels(self._note_kept)
        self._bringing = set[asyncio.Future[None]]()
        self.others: OtherHosts | None = None
        """None: this host is the only one."""
        self.link = HostLinkMemory()
        """Paces the link that this host's devices share, if they share one."""
        self.peer_link = HostLinkMemory()
        """Paces the link over which they reach each other's memory, if it has a pace."""

    def __len__(self) -> int:
        """Return the number of distinct segments, and of records of models, that are held."""
        return len(self._held) + len(self.models)

    def forget(self, model: str) -> None:
        """Keep a model no longer that no worker serves: it has left the fleet."""
        self.models.forget(_name(model))
        self._drop_unheld()

    def handed(self) -> HandedWeights:
        """Return what is kept of models, for the server that takes this one's place. What is not
        sealed is not handed over: any process could have changed it."""
        found = HandedWeights()
        for name, kind, kept in self.models.items():
            segments = {d: held.fd for d, held in self._held.items() if d in kept.digests}
            if all(map(is_sealed, (kept.record, *segments.values()))):
                found.models.append(HandedModel(name, kind, kept.files, kept.record))
                found.segments.update(segments)
        return found

    def adopt(self, handed: HandedWeights, models: Iterable[ModelSettings]) -> Callable[[], None]:
        """Keep those of a fleet's models that the server before this one has loaded, and whose
        files are as they were; the others are freed. Returns what frees those that no worker has
        taken since.

        Raises ValueError for what is not sealed, and nothing is kept then.
        """
        if not all(map(is_sealed, handed.descriptors)):
            raise ValueError("it is not sealed")
        settings = {_name(model.name): model for model in models}
        for model in handed.models:
            kept = KeptModel.read(model.record, model.files, handed=True)
            if model.name in settings and _is_as_loaded(kept, settings[model.name]):
                self.models.adopt(model.name, model.kind, kept)
            else:
                os.close(model.record)
        self._held = {digest: _Held(fd) for digest, fd in handed.segments.items()}
        self._drop_unheld()

        def drop() -> None:
            self.models.drop_handed()
            self._drop_unheld()

        return drop

    def sharing(self, link: LinkSettings) -> LinkSettings:
        """Return a device's link with the memory by which all devices of the host pace it."""
        memory = self.link.path if link.shared else ""
        peer = "" if link.peer_bytes_per_second is None else self.peer_link.path
        return replace(link, memory=memory, peer_memory=peer)

    def open(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection: the broker's, for `close`, and a worker's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
        return ours, theirs

    def close(self, connection: socket.socket) -> None:
        """Release the segments of a worker that has ended, but for those of models that are kept; a
        second call does nothing."""
        if connection.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        self.models.bereave(connection)
        self.let_go(connection)

    # -- for models of other hosts ---------------------------------------------------------------

    def record_of(self, model: str, kind: str) -> int | None:
        """Return the descriptor, which stays the broker's, of a kept model's record."""
        kept = self.models.get(model, kind)
        return None if kept is None else kept.record

    def segment(self, digest: str) -> int | None:
        """Return the descriptor, which stays the broker's, of a segment that is held."""
        held = self._held.get(digest)
        return None if held is None else held.fd

    def hold(self, digest: str, fd: int | None, holder: object) -> None:
        """Hold a segment, for `let_go`: `fd`, which this takes over, or one that is held."""
        if digest in self._held:
            if fd is not None:
                os.close(fd)
        elif fd is not None:
            self._held[digest] = _Held(fd)
        self._held[digest].holders.add(holder)

    def let_go(self, holder: object) -> None:
        """Release all segments of a holder, but for those of models that are kept."""
        for digest in [d for d, held in self._held.items() if holder in held.holders]:
            self._release(digest, holder)

    def keep_brought(self, model: str, kind: str, files: str, record: int) -> bool:
        """Keep a model whose segments are held, by its record, which this takes over, for the
        worker that is to serve it. Returns False as `KeptModels.keep`."""
        return self.models.keep(model, kind, files, record, None)

    def _note_kept(self, model: str, kind: str, kept: bool) -> None:
        if self.others is not None:
            self.others.changed(model, kind, kept)

    async def _bring(self, model: str, kind: str, listing: str, worker: socket.socket) -> None:
        if self.others is not None:
            await self.others.bring(model, kind, listing)
        with contextlib.suppress(OSError):  # it may have ended
            worker.send(_KEEP if self.record_of(model, kind) is None else _TAKE)

    # -- for workers -----------------------------------------------------------------------------

    def _read(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            message, fds = receive(connection, _LONGEST)
            kind, digest = message[:1], message[1 : 1 + _DIGEST].decode()
            origin = message[1 + _DIGEST :].decode()
            if not message:
                self.close(connection)
            elif kind == _SEALS:
                connection.send(_WRITABLE if self._writable else _SEALED)
            elif kind == _FIND:
                self._find(self._digests.get(digest), connection)
            elif kind == _MAP:
                self._find(digest, connection)
            elif kind in _OF_MODELS:
                self._model(kind, digest, origin, connection, fds)
            elif kind == _SHARE and fds:
                self._share(digest, connection, fds)
                if origin:
                    self._digests[origin] = digest
            else:
                self._release(digest, connection)
        except BlockingIOError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("a worker's segments are not shared any more: %s", error)
            self.close(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _model(
        self, kind: bytes, model: str, rest: str, connection: socket.socket, fds: list[int]
    ) -> None:
        """Answer a request about a model; `rest`: its kind, and the identity of its files."""
        how, files = rest[:_DIGEST], rest[_DIGEST:]
        if kind == _MODEL_KNOWN:
            connection.send(_TAKE if model in self.models else _KEEP)
        elif kind == _MODEL_FIND:
            kept = self.models.find(model, how, connection)
            if kept is None:
                connection.send(_KEEP)
            else:
                socket.send_fds(connection, [_TAKE], [kept.record])
        elif kind == _MODEL_KEEP and fds:
            done = self.models.keep(model, how, files, fds.pop(), connection)
            connection.send(_KEEP if done else _REFUSED)
        elif kind == _MODEL_BRING:
            bringing = asyncio.ensure_future(self._bring(model, how, files, connection))
            self._bringing.add(bringing)
            bringing.add_done_callback(self._bringing.discard)
        else:
            self.models.release(model, connection)
            self._drop_unheld()

    def _find(self, digest: str | None, connection: socket.socket) -> None:
        if digest is None or digest not in self._held:
            connection.send(_KEEP)
        else:
            self._held[digest].holders.add(connection)
            socket.send_fds(connection, [_TAKE + digest.encode()], [self._held[digest].fd])

    def _share(self, digest: str, connection: socket.socket, fds: list[int]) -> None:
        held = self._held.get(digest)
        if held is None:
            held = self._held[digest] = _Held(fds.pop())
            held.holders.add(connection)
            connection.send(_KEEP)
        else:
            held.holders.add(connection)
            socket.send_fds(connection, [_TAKE], [held.fd])

    def _release(self, digest: str, holder: object) -> None:
        held = self._held.get(digest)
        if held is None:
            return
        held.holders.discard(holder)
        self._drop(digest)

    def _drop(self, digest: str) -> None:
        """Free a segment that no worker holds and that no kept model has."""
        held = self._held[digest]
        if not held.holders and not self.models.holds(digest):
            os.close(held.fd)
            del self._held[digest]
            self._digests = {o: d for o, d in self._digests.items() if d != digest}

    def _drop_unheld(self) -> None:
        for digest in list(self._held):
            self._drop(digest)


class SegmentClient:
    """A worker's end, an `Exchange` for its host tier; used by one thread at a time."""

    def __init__(self, fd: int) -> None:
        """Own `fd`, the worker's end of the connection, from now on."""
        self._connection = socket.socket(fileno=fd)

    @property
    def writable(self) -> bool:
        """Whether segments are writable, the same for all workers; False if the broker is gone."""
        answer = b""
        with contextlib.suppress(OSError):
            self._connection.send(_SEALS)
            answer, _ = receive(self._connection, _LONGEST)
        return answer == _WRITABLE

    def find(self, origin: str) -> tuple[str, int] | None:
        """Return the digest of a segment with this origin, and a descriptor, which the caller owns.

        None if no other process holds one, or the broker is gone.
        """
        message, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            self._connection.send(_FIND + origin.encode())
            message, fds = receive(self._connection, _LONGEST)
        return (message[1:].decode(), fds[0]) if fds else None

    def share(self, digest: str, fd: int, origin: str | None) -> int | None:
        """Offer the segment in `fd`, made of `origin`, to other workers.

        Returns a descriptor, which the caller owns, of an equal segment that another worker holds
        already; None if there is none, or the broker is gone.
        """
        fds: list[int] = []
        with contextlib.suppress(OSError):
            message = _SHARE + digest.encode() + (origin or "").encode()
            socket.send_fds(self._connection, [message], [fd])
            _, fds = receive(self._connection, _LONGEST)
        return fds[0] if fds else None

    def map(self, digest: str) -> int | None:
        """Return a descriptor, which the caller owns, of a segment that a worker holds, or has held
        for a model that is kept; None: there is none, or the broker is gone."""
        _, fds = self._ask(_MAP, digest)
        return fds[0] if fds else None

    def knows_model(self, model: str) -> bool:
        """Return whether a model of this name is kept, of whatever kind."""
        answer, _ = self._ask(_MODEL_KNOWN, _name(model))
        return answer == _TAKE

    def bring_model(self, model: str, kind: str, listing: str) -> bool:
        """Have a model brought from another host; returns whether it is kept here now."""
        answer, _ = self._ask(_MODEL_BRING, _name(model), kind, listing)
        return answer == _TAKE

    def find_model(self, model: str, kind: str) -> int | None:
        """Return a descriptor, which the caller owns, of a kept model's record; None: it is not
        kept, or the broker is gone."""
        _, fds = self._ask(_MODEL_FIND, _name(model), kind)
        return fds[0] if fds else None

    def keep_model(self, model: str, kind: str, files: str, record: int) -> bool:
        """Have a model kept by its record; False: it has been loaded from other files."""
        answer, _ = self._ask(_MODEL_KEEP, _name(model), kind, files, fd=record)
        return answer != _REFUSED

    def forget_model(self, model: str) -> None:
        """Report that this worker does not serve a model any more."""
        with contextlib.suppress(OSError):
            self._connection.send(_MODEL_FORGET + _name(model).encode())

    def _ask(self, kind: bytes, *what: str, fd: int | None = None) -> tuple[bytes, list[int]]:
        """Send a request; return the broker's answer, which is empty if the broker is gone."""
        with contextlib.suppress(OSError):
            message = kind + "".join(what).encode()
            socket.send_fds(self._connection, [message], [] if fd is None else [fd])
            return receive(self._connection, _LONGEST)
        return b"", []

    def release(self, digest: str) -> None:
        """Report to the broker that this process does not hold the segment any more."""
        with contextlib.suppress(OSError):
            self._connection.send(_RELEASE + digest.encode())

    def close(self) -> None:
        """Close the connection, upon which the broker releases all segments of this worker."""
        self._connection.close()


def _is_as_loaded(kept: KeptModel, settings: ModelSettings) -> bool:
    """Return whether a model's files are those that it was loaded from."""
    tokenizer = digest_of(Path(settings.path))
    return kept.files == identity(settings) and kept.tokenizer == tokenizer


def _name(model: str) -> str:
    """Digest of a model's name, which may be long."""
    return hashlib.sha256(model.encode()).hexdigest()
