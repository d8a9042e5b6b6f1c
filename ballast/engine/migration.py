"""Migrate running requests with their KV: export to another device, import from one.

Part of `DeviceState`; `ballast.core.migration` shows the exchange of messages. Imported KV lies in
a block table of its own until the request arrives; then its blocks join the prefix cache and are
found there at admission. KV that is missing, even all of it, is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ballast.core import migration
from ballast.core.event import Event
from ballast.core.migration import (
    DropKvEvent,
    ImportKvEvent,
    KvReadEvent,
    KvTailEvent,
    MigrationAnswer,
)
from ballast.core.request import Request, RequestState
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.kv import extents

MOST_TAIL_BYTES = 64 << 20
"""Most bytes of KV, filled between export and departure, that are sent; more is recomputed."""


class KvBytes(Protocol):
    """Copies bytes of KV, of this device and from other devices' processes. Implemented by
    `ballast.memory.peer_reader` for live CPU devices."""

    def start(
        self,
        request_id: str,
        source: str,
        pieces: Sequence[migration.Piece],
        targets: Sequence[tuple[int, int]],
        attempt: int,
    ) -> None:
        """Read `pieces` of the process at `source` to `targets`, (address, bytes) in order;
        `KvReadEvent`, with `attempt`, will come through the inbox."""

    def stop(self, request_id: str) -> None:
        """Stop writing for a request before this returns; a `KvReadEvent` may still come."""

    def load(self, address: int, n_bytes: int) -> bytes:
        """Return the bytes at an address of this process."""

    def store(self, address: int, data: bytes) -> None:
        """Write bytes to an address of this process."""

    def close(self) -> None:
        """Stop all writes before this returns."""


MakeKvBytes = Callable[[Callable[[Event], None]], KvBytes]
"""Makes the `KvBytes` of a device; the argument posts events to its inbox."""


@dataclass(slots=True)
class _Export:
    table: list[int]
    """The request's block table when exported; after a preemption the request has another list."""
    relocations: int
    """`KvCache.relocations` when exported."""
    n: int
    """Number of blocks exported, from the table's beginning."""
    attempt: int


@dataclass(slots=True)
class _Import:
    model: ModelState
    known: tuple[int, ...]
    """Tokens whose KV is read from the source."""
    salt: str
    blocks: list[int]
    tokens: int
    """Number of tokens whose KV has been imported, or will be."""
    attempt: int
    read: bool = False
    """Whether the read has ended successfully."""


class Migration:
    """Exports and imports of one device's requests. Used by the loop's thread only."""

    def __init__(self) -> None:
        self.bytes: KvBytes | None = None
        """Copier of KV bytes; None: this device can neither import nor export."""
        self.exports = False
        """Whether other processes can read this device's memory; requires `bytes`."""
        self.send: Callable[[MigrationAnswer], None] = _send_nowhere
        """Sends an answer to the controller; must not block."""
        self._exported: dict[str, _Export] = {}
        self._departing: dict[str, int] = {}
        """By request, the attempt."""
        self._imported: dict[str, _Import] = {}
        self._answers: list[MigrationAnswer] = []

    @property
    def departing(self) -> bool:
        """Whether any request has been ordered to depart and has not yet."""
        return bool(self._departing)

    # -- the source -------------------------------------------------------------------------------

    def export(self, m: ModelState, request: Request, attempt: int) -> None:
        """Answer where the KV of a request's full blocks lies; the request keeps running."""
        n = request.computed // m.spec.block_tokens
        if request.state is not RequestState.RUNNING or m.spec.kv_windows:
            n = 0  # what has left a window is not there
        n, pieces = extents.pieces(m.kv, request.blocks[:n])
        if n == 0:
            self.nothing(request.id, attempt)
            return
        self._exported[request.id] = _Export(request.blocks, m.kv.book.relocations, n, attempt)
        if not self.exports:
            self.nothing(request.id, attempt)
            return
        tokens, form = n * m.spec.block_tokens, extents.form(m.kv)
        answer = migration.KvExportedAnswer(request.id, tokens, form, pieces, attempt)
        self._answers.append(answer)

    def nothing(self, request_id: str, attempt: int) -> None:
        """Answer that no KV of a request can be exported."""
        self._answers.append(migration.KvExportedAnswer(request_id, 0, attempt=attempt))

    def depart(self, request_id: str, attempt: int) -> None:
        """Mark a request to depart as soon as `leaves` allows it."""
        self._departing[request_id] = attempt

    def leaves(self, m: ModelState, request: Request) -> bool:
        """Return whether a request must end here now to continue on another device, and answer so.

        True for a departing request whose last block is full, or whose exported KV is no longer
        valid. The request must not be in a job."""
        if request.id not in self._departing:
            return False
        was = self._stayed(m, request)
        if was is None:
            self._depart(request.id, intact=False)
            return True
        if request.computed % m.spec.block_tokens:
            return False
        assert self.bytes is not None, "it could not have been exported"
        rest = request.blocks[was.n : request.computed // m.spec.block_tokens]
        if any(block < 0 for block in rest):
            rest = []  # staged since; computed again there
        places = extents.extents(m.kv, rest)
        if sum(n for _, n in places) > MOST_TAIL_BYTES:
            rest, places = [], []
        tail = b"".join(self.bytes.load(address, n) for address, n in places)
        self._depart(request.id, intact=True, tokens=len(rest) * m.spec.block_tokens, tail=tail)
        return True

    def _stayed(self, m: ModelState, request: Request) -> _Export | None:
        """Return a request's export if its KV has not moved since; else None."""
        was = self._exported.get(request.id)
        if (
            was is None
            or was.attempt != self._departing[request.id]
            or request.state is not RequestState.RUNNING
            or request.blocks is not was.table
        ):
            return None
        return was if m.kv.book.relocations == was.relocations else None

    def _depart(self, request_id: str, **how: Any) -> None:
        attempt = self._departing.pop(request_id)
        self._exported.pop(request_id, None)
        self._answers.append(migration.DepartedAnswer(request_id, **how, attempt=attempt))

    def ended(self, request_id: str) -> None:
        """Forget the export of a request that has ended, and answer its departure if ordered."""
        self._exported.pop(request_id, None)
        if request_id in self._departing:
            self._depart(request_id, intact=False)

    # -- the target -------------------------------------------------------------------------------

    def begin(self, m: ModelState | None, event: ImportKvEvent, adapter: int | None) -> None:
        """Start reading the KV of a request that will arrive, if its model is resident and pages
        are free; else answer that nothing is imported."""
        wanted = event.wanted
        self._drop(wanted.id)
        assert self.bytes is not None, "a device without them is not asked"
        blocks = [] if m is None else self._room(m, event)
        if m is None or not blocks:
            self._answers.append(migration.KvImportedAnswer(wanted.id, 0, event.attempt))
            return
        salt = Request.salt_of(wanted, m.spec, adapter)
        self._imported[wanted.id] = _Import(
            m, wanted.prompt, salt, blocks, len(wanted.prompt), event.attempt
        )
        targets = extents.extents(m.kv, blocks)
        self.bytes.start(wanted.id, event.source, event.pieces, targets, event.attempt)

    def _room(self, m: ModelState, event: ImportKvEvent) -> list[int]:
        """Allocate blocks for an import; empty if it is not possible."""
        tokens = len(event.wanted.prompt)
        if m.residency is not Residency.RESIDENT:
            return []
        if tokens % m.spec.block_tokens or extents.form(m.kv) != event.form:
            return []
        blocks: list[int] = []
        if m.kv.grow(blocks, tokens) is not None:
            return []
        if m.kv.borrowed.among(blocks):  # its lender may ask for the pages at any time
            m.kv.free(blocks)
            return []
        return blocks

    def read(self, event: KvReadEvent) -> None:
        """Record the end of a read, and answer how many tokens have been imported."""
        here = self._imported.get(event.request_id)
        if here is None or here.attempt != event.attempt:
            return  # dropped meanwhile
        here.read = event.error is None
        if not here.read:
            self._drop(event.request_id)
        tokens = here.tokens if here.read else 0
        answer = migration.KvImportedAnswer(event.request_id, tokens, event.attempt)
        self._answers.append(answer)

    def extend(self, event: KvTailEvent) -> None:
        """Append further KV to an import, if pages are free."""
        here = self._imported.get(event.request_id)
        if here is None or self.bytes is None or not here.read or not event.tokens:
            return
        if here.attempt != event.attempt:
            return
        kv, blocks = here.model.kv, here.blocks
        known = len(blocks)
        if kv.grow(blocks, here.tokens + event.tokens) is not None:
            return
        more = blocks[known:]
        places = extents.extents(kv, more)
        if kv.borrowed.among(more):
            kv.free(more)
            del blocks[known:]
            return
        at = 0
        for address, n in places:
            self.bytes.store(address, event.data[at : at + n])
            at += n
        here.tokens += event.tokens

    def drop(self, event: DropKvEvent) -> None:
        """Drop an import: the request will not arrive, or not with this KV."""
        self._drop(event.request_id)

    def adopt(self, m: ModelState, request: Request) -> None:
        """Add the KV imported for a request that has arrived to the prefix cache, if it matches."""
        here = self._imported.get(request.id)
        if here is None:
            return
        known = tuple(request.tokens[: len(here.known)])
        same = here.read and here.model is m and known == here.known and here.salt == request.salt
        if same and here.tokens <= len(request.tokens):
            tenant = request.submission.tenant
            m.kv.remember(request.tokens, here.blocks, here.tokens, here.salt, tenant)
        self._drop(request.id)

    def forget(self, m: ModelState) -> None:
        """Drop all imports of a model that is evicted or leaves."""
        for request_id in [i for i, here in self._imported.items() if here.model is m]:
            self._drop(request_id)

    def forget_all(self) -> bool:
        """Drop all imports that are not adopted yet; return whether there were any."""
        found = list(self._imported)
        for request_id in found:
            self._drop(request_id)
        return bool(found)

    def tables(self, m: ModelState) -> Iterable[list[int]]:
        """Return the block tables of `m`'s imports that are not adopted; blocks must not move."""
        return [here.blocks for here in self._imported.values() if here.model is m]

    def _drop(self, request_id: str) -> None:
        here = self._imported.pop(request_id, None)
        if here is None:
            return
        if self.bytes is not None and not here.read:
            self.bytes.stop(request_id)
        here.model.kv.free(here.blocks)

    # -- both -------------------------------------------------------------------------------------

    def send_answers(self) -> None:
        """Send the turn's answers to the controller, which must have the turn's outputs first."""
        if self._answers:
            answers, self._answers = self._answers, []
            for answer in answers:
                self.send(answer)


def _send_nowhere(answer: MigrationAnswer) -> None:
    """Drop an answer, where no controller is connected."""
