"""What server and worker say to each other: schema-checked on receipt, never pickled.

Two unions, one per direction, each member tagged by its name. Vocabulary of `ballast.core` travels
as it is; outputs, of which there is one per token, get a tagged wrapper each, since plain
dataclasses carry no tag that would tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from ballast import __version__
from ballast.core import migration
from ballast.core.actions import Activate, Change, Evict, Lend, Recall
from ballast.core.capability import Reach
from ballast.core.command import Add, DeviceOrder, Outcome, Remove
from ballast.core.errors import BallastError
from ballast.core.event import (
    Cancelled,
    Embedded,
    Failed,
    Finished,
    Output,
    PromptScores,
    TokenOut,
)
from ballast.core.lease import (
    AskedBack,
    Condemned,
    HasMet,
    Lease,
    Lent,
    LetGo,
    Returned,
    Word,
)
from ballast.core.migration import (
    Depart,
    Departed,
    DropKv,
    ExportKv,
    ImportKv,
    KvExported,
    KvImported,
    KvTail,
)
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings


class MalformedMessage(BallastError):
    """A message does not follow the schema: the two processes are of different versions."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# -- to the worker ------------------------------------------------------------------------------


class Configure(_Message, frozen=True):
    """First message: build this device and serve it."""

    fleet: FleetSettings
    log_level: int = 30
    """As in `logging`; 30: warnings."""


class Submit(_Message, frozen=True):
    """Requests, in order of arrival. A prompt, or a grammar, that several of them have crosses
    once, and is one object in the worker."""

    requests: tuple[Submission, ...]
    """Without their prompts and grammars."""
    prompt_of: tuple[int, ...]
    """By request, the index of its prompt in `prompts`."""
    grammar_of: tuple[int, ...]
    """By request, that of its grammar in `grammars`; -1: it has none."""
    prompts: tuple[tuple[int, ...], ...]
    grammars: tuple[str, ...]

    @classmethod
    def of(cls, submissions: Iterable[Submission]) -> Submit:
        """Prompts that are one object are one here: comparing long ones would take longer."""
        requests: list[Submission] = []
        prompts: dict[int, tuple[int, tuple[int, ...]]] = {}
        grammars: dict[str, int] = {}
        prompt_of: list[int] = []
        grammar_of: list[int] = []
        for s in submissions:
            prompt_of.append(prompts.setdefault(id(s.prompt), (len(prompts), s.prompt))[0])
            sampling = s.sampling
            grammar = sampling.grammar
            grammar_of.append(grammars.setdefault(grammar, len(grammars)) if grammar else -1)
            if grammar:
                sampling = replace(sampling, grammar="")
            requests.append(replace(s, prompt=(), sampling=sampling))
        return cls(
            tuple(requests),
            tuple(prompt_of),
            tuple(grammar_of),
            tuple(prompt for _, prompt in prompts.values()),
            tuple(grammars),
        )

    def unwrap(self) -> list[Submission]:
        """Raises MalformedMessage where an index is of nothing."""
        found: list[Submission] = []
        try:
            for s, p, g in zip(self.requests, self.prompt_of, self.grammar_of, strict=True):
                sampling = s.sampling
                if g >= 0:
                    sampling = replace(sampling, grammar=self.grammars[g])
                found.append(replace(s, prompt=self.prompts[p], sampling=sampling))
        except (IndexError, ValueError) as error:
            raise MalformedMessage(f"malformed message: {error}") from error
        return found


class Withdraw(_Message, frozen=True):
    """Requests whose client is gone, or has what it wanted."""

    request_ids: tuple[str, ...]


class Flow(_Message, frozen=True):
    """Flow control: requests whose clients do not read any more, and those whose clients do."""

    paused: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


class DrainDevice(_Message, frozen=True):
    """Finish what was accepted, take nothing new, then exit."""


class StopDevice(_Message, frozen=True):
    """Exit after the job in flight; what is open fails with `reason`."""

    reason: str


class Command(_Message, frozen=True):
    """An operator's order, one of those that the fields are for; `Done` answers with the same id.

    Orders are told apart by their field, as plain dataclasses carry no tag.
    """

    id: int
    add: Add | None = None
    remove: Remove | None = None
    change: Change | None = None
    activate: Activate | None = None
    evict: Evict | None = None
    lend: Lend | None = None
    recall: Recall | None = None

    @classmethod
    def of(cls, id: int, order: DeviceOrder) -> Command:
        return cls(id, **{type(order).__name__.lower(): order})  # type: ignore[arg-type]

    @property
    def order(self) -> DeviceOrder:
        """Raises MalformedMessage unless there is one."""
        orders = (self.add, self.remove, self.change, self.activate, self.evict)
        fields = (*orders, self.lend, self.recall)
        given = [order for order in fields if order is not None]
        if len(given) != 1:
            raise MalformedMessage(f"a command with {len(given)} orders")
        return given[0]


class Meet(_Message, frozen=True):
    """Another device's worker, with which pages may be lent; it gives its memory at `address`."""

    peer: str
    epoch: int
    address: str


class Gone(_Message, frozen=True):
    """That worker has ended, and has been reaped."""

    peer: str
    epoch: int


class OfLease(_Message, frozen=True):
    """What a lender says to a borrower, or back; passed on in order."""

    what: Literal["Lent", "AskedBack", "Returned"]
    lease: Lease

    @classmethod
    def of(cls, word: Lent | AskedBack | Returned) -> OfLease:
        return cls(type(word).__name__, word.lease)  # type: ignore[arg-type]

    @property
    def word(self) -> Lent | AskedBack | Returned:
        return _OF_LEASES[self.what](self.lease)


_OF_LEASES: dict[str, type[Lent | AskedBack | Returned]] = {
    kind.__name__: kind for kind in (Lent, AskedBack, Returned)
}


class Migrate(_Message, frozen=True):
    """Of a request that moves from one device to another: one of those that the fields are for."""

    export: ExportKv | None = None
    depart: Depart | None = None
    fetch: ImportKv | None = None
    tail: KvTail | None = None
    drop: DropKv | None = None

    @classmethod
    def of(cls, order: migration.Order) -> Migrate:
        match order:
            case ExportKv():
                return cls(export=order)
            case Depart():
                return cls(depart=order)
            case ImportKv():
                return cls(fetch=order)
            case KvTail():
                return cls(tail=order)
            case DropKv():
                return cls(drop=order)

    @property
    def order(self) -> migration.Order:
        """Raises MalformedMessage unless there is one."""
        fields = (self.export, self.depart, self.fetch, self.tail, self.drop)
        given = [order for order in fields if order is not None]
        if len(given) != 1:
            raise MalformedMessage(f"a migration with {len(given)} steps")
        return given[0]


ToWorker = (
    Configure
    | Submit
    | Withdraw
    | Flow
    | DrainDevice
    | StopDevice
    | Command
    | Meet
    | Gone
    | OfLease
    | Migrate
)


# -- from the worker ----------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The process is up and waits for `Configure`."""

    pid: int
    version: str = __version__


class Ready(_Message, frozen=True):
    """The device serves `specs`; the models of `failed` could not be loaded, for these reasons."""

    specs: dict[str, ModelSpec]
    failed: dict[str, str]
    report: DeviceReport
    pages: str = ""
    """Where it gives its memory to other workers; none: it does not."""
    reach: Reach | None = None


class NotReady(_Message, frozen=True):
    """The device could not be built; the worker exits."""

    reason: str


class Status(_Message, frozen=True):
    """The device as it was a moment ago."""

    report: DeviceReport
    decisions: tuple[dict[str, Any], ...] = ()
    """Those since the last status, oldest first, as the story tells them."""


class Done(_Message, frozen=True):
    """How an order ended."""

    id: int
    outcome: Outcome


class Heartbeat(_Message, frozen=True):
    """The process lives, also while it loads."""

    turn_seconds: float = 0.0
    """How long the present turn of its loop has lasted; 0: it waits for events."""
    job_seconds: float = 0.0
    """How long the present job on its lane has lasted; 0: it is idle."""
    load_seconds: float = 0.0
    """How long it has loaded nothing more, though it is not done; 0: it serves."""


class OfPeer(_Message, frozen=True):
    """What a device has to say of another one's worker."""

    what: Literal["HasMet", "Condemned", "LetGo"]
    peer: str
    epoch: int


def told(word: Word) -> OfLease | OfPeer:
    """A device's word as a message."""
    if isinstance(word, HasMet | Condemned | LetGo):
        return OfPeer(type(word).__name__, word.peer, word.epoch)  # type: ignore[arg-type]
    return OfLease.of(word)


class OfRequest(_Message, frozen=True):
    """What a device has to say of a request that moves: one of those that the fields are for."""

    exported: KvExported | None = None
    imported: KvImported | None = None
    departed: Departed | None = None

    @property
    def word(self) -> migration.Word:
        """Raises MalformedMessage unless there is one."""
        given = [w for w in (self.exported, self.imported, self.departed) if w is not None]
        if len(given) != 1:
            raise MalformedMessage(f"{len(given)} words of a request")
        return given[0]


def of_request(word: migration.Word) -> OfRequest:
    """A device's word as a message."""
    match word:
        case KvExported():
            return OfRequest(exported=word)
        case KvImported():
            return OfRequest(imported=word)
        case Departed():
            return OfRequest(departed=word)


class Drained(_Message, frozen=True):
    """The device's loop has returned; the worker exits."""


class _Wrapper(msgspec.Struct, frozen=True, array_like=True):
    pass


class WrappedToken(_Wrapper, frozen=True, tag="t"):
    output: TokenOut


class WrappedFinished(_Wrapper, frozen=True, tag="f"):
    output: Finished


class WrappedFailed(_Wrapper, frozen=True, tag="e"):
    output: Failed


class WrappedCancelled(_Wrapper, frozen=True, tag="c"):
    output: Cancelled


class WrappedScores(_Wrapper, frozen=True, tag="s"):
    output: PromptScores


class WrappedEmbedded(_Wrapper, frozen=True, tag="v"):
    output: Embedded


Wrapped = (
    WrappedToken
    | WrappedFinished
    | WrappedFailed
    | WrappedCancelled
    | WrappedScores
    | WrappedEmbedded
)

_WRAPPERS: dict[type, type[Wrapped]] = {
    TokenOut: WrappedToken,
    Finished: WrappedFinished,
    Failed: WrappedFailed,
    Cancelled: WrappedCancelled,
    PromptScores: WrappedScores,
    Embedded: WrappedEmbedded,
}


class Outputs(_Message, frozen=True):
    """Outputs, in the order in which the loop told them."""

    wrapped: tuple[Wrapped, ...]

    @classmethod
    def of(cls, outputs: Iterable[Output]) -> Outputs:
        return cls(tuple(_WRAPPERS[type(o)](o) for o in outputs))  # type: ignore[arg-type]

    def unwrap(self) -> list[Output]:
        return [w.output for w in self.wrapped]


ToServer = (
    Hello
    | Heartbeat
    | Ready
    | NotReady
    | Status
    | Outputs
    | Drained
    | Done
    | OfPeer
    | OfLease
    | OfRequest
)


M = TypeVar("M")

# -- bytes --------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToWorker | ToServer) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises MalformedMessage where `data` is not a message to a worker."""
    return _decode(_to_worker, data)


def decode_to_server(data: bytes) -> ToServer:
    """Raises MalformedMessage where `data` is not a message to the server."""
    return _decode(_to_server, data)


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedMessage(f"malformed message: {error}") from error
