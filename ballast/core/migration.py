"""A request that moves to another device while it runs: what controller and devices say of it.

::

    controller                source                         target
        ─ ExportKv ────────────> goes on
        <─ KvExported ────────── (where its KV lies)
        ─ ImportKv ────────────────────────────────────────────> reads it from the source's memory
        <─ KvImported ────────────────────────────────────────── (how much of it)
        ─ Depart ──────────────> ends it when its last block is full
        <─ Departed ──────────── (with the blocks that have filled meanwhile)
        ─ KvTail, or DropKv; Arrival ──────────────────────────> goes on

Blocks that are full do not change any more, so that they can be read while the request runs: live
migration by copying ahead, as Llumnix has it (Sun et al., OSDI 2024, section 4.2). Nothing holds
the blocks for the reader: whether they stayed is said when the request departs, and if they did not
what was read is dropped. What is missing for whatever reason is computed again by the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.core.request import Sampling, Submission

AT_ONCE = 4
"""Requests of one device that move at a time."""
Piece = tuple[int, int]
"""(offset in the device's memory, bytes)."""


@dataclass(frozen=True, slots=True)
class ExportKvEvent:
    """To the source: say where the KV of a request lies."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DepartEvent:
    """To the source: a request goes on elsewhere; end it as soon as its KV is whole blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ImportKvEvent:
    """To the target: have the KV of a request that is to come."""

    wanted: Submission
    """With the request's id; its prompt are the tokens whose KV it is, whole blocks."""
    form: str
    """Of the KV, as `KvExportedAnswer` says."""
    source: str
    """Where the memory of the source's process is to be had."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class KvReadEvent:
    """At the target: the bytes of an import are there, or cannot be had."""

    request_id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KvTailEvent:
    """To the target: what follows the KV that was read, whole blocks."""

    request_id: str
    tokens: int
    data: bytes


@dataclass(frozen=True, slots=True)
class DropKvEvent:
    """To the target: the request does not come, or what was imported is not its KV."""

    request_id: str


MigrationStep = ExportKvEvent | DepartEvent | ImportKvEvent | KvTailEvent | DropKvEvent
"""What a controller has to say; with `KvReadEvent`, events of a device."""


@dataclass(frozen=True, slots=True)
class KvExportedAnswer:
    """Of the source, to the controller."""

    request_id: str
    tokens: int
    """Whose KV it is, from the first: whole blocks; 0: there is none that could be moved."""
    form: str = ""
    """What has to be the same where it is to be used."""
    pieces: tuple[Piece, ...] = ()
    """Block after block."""


@dataclass(frozen=True, slots=True)
class KvImportedAnswer:
    """Of the target, to the controller."""

    request_id: str
    tokens: int
    """Whose KV is there; 0: none could be had."""


@dataclass(frozen=True, slots=True)
class DepartedAnswer:
    """Of the source, to the controller."""

    request_id: str
    intact: bool
    """Whether what was exported stayed as it was up to now."""
    tokens: int = 0
    """Whose KV followed it, and below that KV; none where it was not intact."""
    tail: bytes = b""


MigrationAnswer = KvExportedAnswer | KvImportedAnswer | DepartedAnswer
"""What a device has to say; the request is the controller's business from then on."""


def wanted(submission: Submission, output: Sequence[int], n: int) -> Submission:
    """The first `n` tokens of a request and its output so far as a prompt, for `ImportKvEvent`."""
    return replace(
        submission,
        prompt=(*submission.prompt, *output)[:n],
        max_tokens=0,
        sampling=Sampling(),
        stop_token_ids=(),
        prompt_logprobs=None,
        resumed=None,
    )


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same bytes in the same order; pieces that lie one after the other are one."""
    found: list[Piece] = []
    for offset, n_bytes in pieces:
        if found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + n_bytes
        else:
            found.append((offset, n_bytes))
    return tuple(found)
