"""Move running requests to another device, with their KV (`ballast.core.migration`).

Used by `Relocation`. Runs in the server and sends orders to both workers; the target's worker reads
the KV from the source's memory. Until a request has departed, its source keeps running it, even if
the target fails; afterwards the target runs it and recomputes tokens whose KV it does not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from ballast.cluster.device import DeviceObserver, RemoteDevice
from ballast.core.migration import (
    AT_ONCE,
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvTailEvent,
    MigrationAnswer,
    wanted,
)
from ballast.core.request import Submission
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import WithdrawMsg

PATIENCE = 10.0
"""Seconds for a device to answer: it may be in a long job, or have a GiB of KV to read."""

W = TypeVar("W", KvExportedAnswer, KvImportedAnswer, DepartedAnswer)


class Migrations(DeviceObserver):
    """Moves running requests between the devices of one server."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[str, type, str], asyncio.Future[MigrationAnswer | None]] = {}
        """Answers that are awaited, by (device, type of answer, request id)."""

    def migration_message(self, device: RemoteDevice, word: MigrationAnswer) -> None:
        """Hand a worker's answer to the migration that waits for it."""
        self._answer((device.name, type(word), word.request_id), word)

    def worker_died(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        """Resolve the awaited answers of a dead worker with None."""
        for key in [key for key in self._awaited if key[0] == device.name]:
            self._answer(key, None)

    async def move_all(
        self,
        request_ids: Sequence[str],
        source: RemoteDevice,
        choose: Callable[[Submission], RemoteDevice | None],
    ) -> int:
        """Move requests, AT_ONCE at a time; return how many of them have left `source`.

        `choose`: returns the target of a request; None: the request stays.
        """
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(request_id: str) -> bool:
            async with turns:
                request = source.requests.get(request_id)
                target = None if request is None else choose(request.submission)
                return target is not None and await self.move(request_id, source, target)

        return sum(await asyncio.gather(*map(one, request_ids)))

    async def move(self, request_id: str, source: RemoteDevice, target: RemoteDevice) -> bool:
        """Move one request; return False if it stays at its source, which goes on with it.

        The request departs when a block of its KV has just filled, so that no token is recomputed.
        Its stream pauses while the last block or two, and the request, are handed to the target.
        """
        imported = await self._import(request_id, source, target)
        request = source.requests.get(request_id)
        if imported and target.down is None and request is not None:
            request.departing = True
            departed = await self._ask(source, DepartEvent(request_id), DepartedAnswer)
            if request_id in source.requests and source.down is None:
                if departed is None:
                    source.tell(WithdrawMsg((request_id,)))
                if departed is None or not departed.intact:
                    target.tell(MigrationOrderMsg.of(DropKvEvent(request_id)))
                else:
                    tail = KvTailEvent(request_id, departed.tokens, departed.tail)
                    target.tell(MigrationOrderMsg.of(tail))
                    target.moved_in += 1
                target.requests.add(source.requests.remove([request_id]))
                return True
        if target.down is None:
            target.tell(MigrationOrderMsg.of(DropKvEvent(request_id)))
        return request_id not in source.requests

    async def _import(self, request_id: str, source: RemoteDevice, target: RemoteDevice) -> bool:
        """Have the target read the KV of a request that the source has so far; return whether it
        has read any."""
        exported = await self._ask(source, ExportKvEvent(request_id), KvExportedAnswer)
        request = source.requests.get(request_id)
        if exported is None or not exported.tokens or request is None or target.down is not None:
            return False
        prefix = wanted(request.submission, request.output_tokens, exported.tokens)
        order = ImportKvEvent(prefix, exported.form, source.pages, exported.pieces)
        imported = await self._ask(target, order, KvImportedAnswer)
        return imported is not None and imported.tokens > 0

    async def _ask(
        self,
        device: RemoteDevice,
        order: ExportKvEvent | ImportKvEvent | DepartEvent,
        kind: type[W],
    ) -> W | None:
        """Send an order and return the answer; None: the worker has died, or does not answer."""
        if device.down is not None:
            return None
        request_id = order.wanted.id if isinstance(order, ImportKvEvent) else order.request_id
        key = device.name, kind, request_id
        future = asyncio.get_running_loop().create_future()
        self._awaited[key] = future
        device.tell(MigrationOrderMsg.of(order))
        try:
            async with asyncio.timeout(PATIENCE):
                word = await future
        except TimeoutError:
            return None
        finally:
            if self._awaited.get(key) is future:
                del self._awaited[key]
        assert word is None or isinstance(word, kind)
        return word

    def _answer(self, key: tuple[str, type, str], word: MigrationAnswer | None) -> None:
        future = self._awaited.get(key)
        if future is not None and not future.done():
            future.set_result(word)
