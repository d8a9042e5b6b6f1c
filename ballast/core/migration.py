"""Define the steps that move a running request to another device with its KV, and their answers.

Decided by `control.migrations` and handled by the engine of source and target.

::

    controller                source                         target
        ─ ExportKvEvent ───────> goes on
        <─ KvExportedAnswer ──── (where its KV lies)
        ─ ImportKvEvent ───────────────────────────────────────> reads it from the source's memory
        <─ KvImportedAnswer ──────────────────────────────────── (how much of it)
        ─ DepartEvent ─────────> ends it when its last block is full
        <─ DepartedAnswer ────── (with the blocks that have filled meanwhile)
        ─ KvTailEvent, or DropKvEvent; ArrivalEvent ───────────> goes on

Full blocks do not change any more, so they can be read while the request runs: live migration by
copying ahead, as in Llumnix (Sun et al., OSDI 2024, section 4.2). The source does not pin the
blocks for the reader: `DepartedAnswer.intact` is False if they changed, and the copy is dropped.
The target recomputes all KV that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.core.request import Sampling, Submission

AT_ONCE = 4
"""Bound of the requests of one device that move at the same time."""
MOST_SECONDS = 2.0
"""Time that KV of a request may take from host to host, if it has the network alone; more is
recomputed: `control.migrations` would not wait for AT_ONCE of them."""
Piece = tuple[int, int]
"""(offset in the device's memory, bytes)."""


@dataclass(frozen=True, slots=True)
class ExportKvEvent:
    """To the source: export the KV of a request, which goes on."""

    request_id: str
    attempt: int = 0
    """Number of the migration; the answer has it too."""


@dataclass(frozen=True, slots=True)
class DepartEvent:
    """To the source: end a request as soon as its KV is whole blocks; the target continues it."""

    request_id: str
    attempt: int = 0
    """Number of the migration; the answer has it too."""


@dataclass(frozen=True, slots=True)
class ImportKvEvent:
    """To the target: import the KV of a request that will arrive."""

    wanted: Submission
    """A submission with the request's id, whose prompt is the tokens of the KV: whole blocks."""
    form: str
    """Format of the KV, as in `KvExportedAnswer`."""
    source: str
    """Address at which the source's process exports its memory, or of `at_host`, where that is on
    another host."""
    pieces: tuple[Piece, ...]
    attempt: int = 0
    """Number of the migration; the answer has it too."""


@dataclass(frozen=True, slots=True)
class KvReadEvent:
    """At the target: the bytes of an import have been read, or could not be."""

    request_id: str
    error: str | None = None
    attempt: int = 0
    """Number of the migration."""


@dataclass(frozen=True, slots=True)
class KvTailEvent:
    """To the target: the KV that follows the imported one, in whole blocks."""

    request_id: str
    tokens: int
    data: bytes
    attempt: int = 0
    """Number of the migration."""


@dataclass(frozen=True, slots=True)
class DropKvEvent:
    """To the target: drop the imported KV; the request does not come, or its KV has changed."""

    request_id: str


MigrationStep = ExportKvEvent | DepartEvent | ImportKvEvent | KvTailEvent | DropKvEvent
"""Steps that the controller sends to a device; with `KvReadEvent`, events of the device."""


@dataclass(frozen=True, slots=True)
class KvExportedAnswer:
    """From the source: where the KV of a request is in its memory."""

    request_id: str
    tokens: int
    """Tokens, from the first, whose KV is exported: whole blocks; 0: none can be moved."""
    form: str = ""
    """Format of the KV; the target has to use the same one."""
    pieces: tuple[Piece, ...] = ()
    """Location of the KV, block after block."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class KvImportedAnswer:
    """From the target: how much KV of a request was imported."""

    request_id: str
    tokens: int
    """Number of tokens whose KV was imported; 0: none."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class DepartedAnswer:
    """From the source: the request has ended here, with the KV that followed what was exported."""

    request_id: str
    intact: bool
    """Whether the exported blocks were unchanged up to now."""
    tokens: int = 0
    """Number of tokens whose KV is in `tail`; 0 where the export was not intact."""
    tail: bytes = b""
    attempt: int = 0


MigrationAnswer = KvExportedAnswer | KvImportedAnswer | DepartedAnswer
"""Answers of a device to the controller."""


def at_host(host: str, ticket: str) -> str:
    """Return the address of memory on another host, for `ImportKvEvent.source`: the pieces that the
    host's agent has been told, under this ticket, to send."""
    return f"{host}/{ticket}"


def is_elsewhere(source: str) -> bool:
    """Return whether an address is one of `at_host`."""
    return "/" in source


def elsewhere(source: str) -> tuple[str, str]:
    """Return the host and the ticket of `at_host`."""
    host, _, ticket = source.rpartition("/")
    return host, ticket


def too_long(pieces: Sequence[Piece], network: float | None) -> bool:
    """Return whether pieces are not sent to another host, which receives `network` bytes per second
    (None: at once)."""
    return network is not None and sum(n for _, n in pieces) > MOST_SECONDS * network


def wanted(submission: Submission, output: Sequence[int], n: int) -> Submission:
    """Return the first `n` tokens of prompt and output as a prompt, for `ImportKvEvent`."""
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
    """Merge pieces that are adjacent in memory; bytes and their order stay the same."""
    found: list[Piece] = []
    for offset, n_bytes in pieces:
        if found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + n_bytes
        else:
            found.append((offset, n_bytes))
    return tuple(found)
