"""Define the events that change a device's engine state, and the outputs that it sends to clients.

The loop takes events from its inbox; lanes, links, the worker and policies' timers post them. The
engine's state changes by events and actions only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.actions import LoopCommand
from ballast.core.fleet_state import OPERATOR
from ballast.core.job import Job, SampledToken
from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.lease import (
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
    PeerMetEvent,
)
from ballast.core.migration import (
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvReadEvent,
    KvTailEvent,
)
from ballast.core.request import Submission


@dataclass(frozen=True, slots=True)
class ArrivalEvent:
    """A request has reached the device."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class CancelEvent:
    """The client of a request has left, or needs no more output (a stop string was found)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PauseEvent:
    """The client of a request does not read: no job includes it until a `ResumeEvent`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResumeEvent:
    """The client of a paused request reads again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GrammarReadyEvent:
    """Compilation of a request's grammar has ended, with success or with an error."""

    request_id: str
    code: str | None = None
    """Code of the error, as in `FailedOutput`; None: the grammar is ready."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobDoneEvent:
    """A job has ended with success. `seconds`: its time on the lane."""

    job: Job
    results: tuple[JobResult, ...]
    seconds: float
    stall: float = 0.0
    """Part of `seconds` in which it waited for rotating or arriving layers."""
    carried: tuple[float, float] = (0.0, 0.0)
    """Seconds for which links carried what it read elsewhere than on the device, and what it wrote
    there, whether it waited or not; 0 on GPUs. In virtual time: of jobs with a prefill, on borrowed
    pages."""


@dataclass(frozen=True, slots=True)
class JobFailedEvent:
    """A job has raised an exception; other jobs are not affected."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class TransferDoneEvent:
    """All copies of one transfer (a model's activation) have ended, with success or an error."""

    transfer_id: int
    n_bytes: int
    seconds: float
    """From the start of its first copy to the end of its last."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class FirstJobReadyEvent:
    """Enough of a transfer's weights has arrived for the model's first job to begin; the job waits
    for each layer that is still in transfer."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class RotationSettledEvent:
    """No layer of a model is in transfer any more, so its rotation can change."""

    model: str


@dataclass(frozen=True, slots=True)
class TimerEvent:
    """A policy's wake-up time has come, or a deadline has passed."""


@dataclass(frozen=True, slots=True)
class DrainEvent:
    """Accept no new requests; the loop ends when the last accepted one has been answered."""


@dataclass(frozen=True, slots=True)
class StopEvent:
    """End the loop now; open requests fail with `reason`."""

    reason: str = "the worker was stopped"


@dataclass(frozen=True, slots=True)
class CommandEvent:
    """A command for the loop from outside the device; its result is reported under the same id."""

    id: str
    command: LoopCommand
    by: str = OPERATOR
    """Who ordered it: `operator` or `policy`, the fleet's."""


Event = (
    ArrivalEvent
    | CancelEvent
    | PauseEvent
    | ResumeEvent
    | GrammarReadyEvent
    | JobDoneEvent
    | JobFailedEvent
    | TransferDoneEvent
    | FirstJobReadyEvent
    | RotationSettledEvent
    | TimerEvent
    | DrainEvent
    | StopEvent
    | CommandEvent
    | PeerMetEvent
    | PeerGoneEvent
    | PagesLentEvent
    | PagesRecalledEvent
    | PagesReturnedEvent
    | ExportKvEvent
    | DepartEvent
    | ImportKvEvent
    | KvReadEvent
    | KvTailEvent
    | DropKvEvent
    | KvFoundEvent
    | KvFetchedEvent
)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """To the client: a new token. `index` counts from 0 within the output."""

    request_id: str
    token: int
    index: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, likeliest first, as many as asked for."""
    queued: float | None = None
    """Seconds from the request's arrival to its first admission; set with its first token only."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission; set with its first token only."""
    fetched: tuple[tuple[str, int], ...] = ()
    """Of these, tokens whose KV came from tiers below the device, by tier."""
    activating: float = 0.0
    """Seconds of `queued` during which the model's weights were coming."""


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """To the client: the request is complete. `reason` is `stop` or `length`."""

    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    fetched: tuple[tuple[str, int], ...] = ()
    """Of the cached tokens, those whose KV came from tiers below the device, by tier."""


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """To the client: the request ends with an error. `code` as in `RequestError.code`."""

    request_id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class CancelledOutput:
    """To the server: the request has ended without an answer, and its memory is free."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PromptScoresOutput:
    """To the client: log-probabilities of the prompt's tokens from `start` on, given those before.

    Position 0 of a prompt has no score: `start` is at least 1. Parts come in order.
    """

    request_id: str
    start: int
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """By position, the likeliest tokens there; empty if none were asked for."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """To the client: the embedding of a prompt; `FinishedOutput` follows, without any tokens."""

    request_id: str
    values: bytes
    """float32, little endian, as many as the model's hidden size, of Euclidean length 1."""


JobResult = SampledToken | PromptScoresOutput | EmbeddingOutput | FailedOutput
"""Result of a job for one request; `FailedOutput`: it cannot go on, through its own fault."""

Output = (
    TokenOutput
    | FinishedOutput
    | FailedOutput
    | CancelledOutput
    | PromptScoresOutput
    | EmbeddingOutput
)
