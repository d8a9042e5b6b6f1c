"""Define requests: sampling parameters, submissions to a worker, and the engine's request state.

`Submission` crosses from server to worker; `Request` is the engine's record, which only
`ballast.engine` changes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. The next token is a function of them, the logits and the position."""

    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to that of the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of every token in the output, once per occurrence."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias added to its logit)."""
    banned: tuple[int, ...] = ()
    """Tokens that end the output; they cannot be chosen before `min_tokens` output tokens."""
    min_tokens: int = 0
    grammar: str = ""
    """Grammar of the output in llguidance's format; empty: unconstrained."""
    seed: int = 0
    """Always set: the server draws one if the client gave none, and keeps it."""
    choice: int = 0
    """Index among the `n` choices of one request."""
    logprobs: int | None = None
    """Number of likeliest tokens to report log-probabilities of, beside the chosen one's; None:
    report none."""

    @property
    def shaped(self) -> bool:
        """Whether logits are modified before sampling: by penalties, biases, bans or a grammar."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or (self.banned and self.min_tokens)
            or self.grammar
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it reaches a worker: token ids only."""

    id: str
    model: str
    """Name of a model or adapter."""
    prompt: tuple[int, ...]
    max_tokens: int
    """Bound of the output; 0: the request ends when its prompt has been computed."""
    open_ended: bool = False
    """Whether the client gave no `max_tokens`: it is then a default within the rest of the context,
    lowered to what memory can hold."""
    sampling: Sampling = field(default_factory=Sampling)
    arrival: float = 0.0
    """Seconds on the device's clock; set by the inbox on receipt."""
    priority: int = 0
    """Sum of the model's and the request's own priority; higher comes first."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    salt: str = ""
    """Isolates prefix caches between tenants."""
    tenant: str = ""
    """Name of the API key that it came with; scarce resources are divided between tenants."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to report at each prompt position, beside the log-probability of
    the prompt's token (`PromptScoresOutput`); None: report none."""
    embed: bool = False
    """Whether it requests the embedding of the prompt (`EmbeddingOutput`); nothing is generated."""
    second_text: int = 0
    """First position of the second of a pair of texts, to an encoder that tells them apart; 0:
    there is none."""
    resumed: tuple[int, ...] | None = None
    """Output tokens that the client has already, from an earlier worker or another device; the
    output continues after them as it would have there. None: a new request."""
    age: float = 0.0
    """Seconds since its first arrival; its queue position and service level count from then."""
    first_token_age: float | None = None
    """Seconds since its client got its first token; None: it has none."""


class WaitsFor(enum.Flag):
    """Conditions, beside memory and a lane, for which a paused request waits."""

    NOTHING = 0
    GRAMMAR = enum.auto()
    """Its grammar is being compiled."""
    READER = enum.auto()
    """Its client does not read what has been generated."""


class RequestState(enum.Enum):
    """State of a request in the engine."""

    WAITING = "waiting"
    """Queued, holding no blocks: new, preempted, or resumed."""
    RUNNING = "running"
    """Admitted: holds blocks, is in the batch of its model."""
    PAUSED = "paused"
    """Neither queued nor in a batch, holding no blocks, until `Request.waits_for` is nothing."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_LEGAL = {
    RequestState.WAITING: {
        RequestState.RUNNING,
        RequestState.PAUSED,
        RequestState.CANCELLED,
        RequestState.FAILED,
    },
    RequestState.RUNNING: {
        RequestState.WAITING,
        RequestState.PAUSED,
        RequestState.FINISHED,
        RequestState.CANCELLED,
        RequestState.FAILED,
    },
    RequestState.PAUSED: {RequestState.WAITING, RequestState.CANCELLED, RequestState.FAILED},
    RequestState.FINISHED: set[RequestState](),
    RequestState.CANCELLED: set[RequestState](),
    RequestState.FAILED: set[RequestState](),
}


class Precedence(NamedTuple):
    """Total order of the requests of a device, for admission and preemption: lower comes first.

    By priority, then by arrival. The first request of all is never preempted for another.
    """

    rank: int
    """Negative priority."""
    arrival: float
    """Seconds on the device's clock."""
    sequence: int
    """Order in which the device received the requests; breaks ties."""


def next_due(due: float, first: float | None, generated: int, pace: float) -> float:
    """Return the deadline of a request's next token, in seconds on the device's clock; -inf if the
    request can no longer keep its service level.

    `due`: deadline of its first token; `first`: time of its first token, None if there is none;
    `generated`: tokens so far; `pace`: seconds per token after the first that its service level
    allows.
    """
    if first is None:
        return due
    return first + generated * pace if first <= due else -math.inf


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request. Only `ballast.engine` writes it.

    `tokens` is prompt + output; KV exists for `tokens[:computed]`, in `blocks`. While a request
    decodes, exactly one token (the last) is not yet computed.
    """

    submission: Submission
    tokens: list[int]
    order: Precedence
    model: str
    """Name of the model that runs it; for an adapter, the base."""
    adapter: int | None = None
    """Index into the model's adapters; None: the model itself."""
    salt: str = ""
    """Separates its cached prefixes from those of other adapters and tenants."""
    place: int = 0
    """Place in its model's queue (`ballast.core.actions.Reorder`)."""
    turn: int = 0
    """Round in which its tenant's next request is admitted (`ballast.engine.waiting`); 0: it
    has been in no queue."""
    state: RequestState = RequestState.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    fetched: tuple[tuple[str, int], ...] = ()
    """Of these, tokens whose KV came from tiers below the device, by tier."""
    preemptions: int = 0
    undone: int = 0
    """Tokens that it had when it last lost its KV by preemption, or after it; 0: it never has."""
    kept: bool = False
    """Whether it was preempted, and its KV stayed as a cached prefix."""
    in_flight: bool = False
    """Whether it is part of a job that has been started and has not ended."""
    fetching: bool = False
    """Whether KV is being fetched into its blocks; it is in no job meanwhile."""
    cancelled: bool = False
    """Whether a cancellation arrived while in flight; it takes effect when the job ends."""
    waits_for: WaitsFor = WaitsFor.NOTHING
    """Conditions it waits for; if any, it is paused, or will be when the job in flight ends."""
    isolated: bool = False
    """Whether its last job failed with other requests in it; its next job has no others."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    shaped: bool = False
    """Whether its logits are modified before sampling (`Sampling.shaped`)."""
    unscored: int = 0
    """First prompt position whose score is requested and not reported yet; the number of prompt
    tokens if there is none."""
    admitted_at: float | None = None
    streams: bool = False
    """Whether its full blocks are staged on the host: they are more than the device has room
    for."""

    @staticmethod
    def salt_of(submission: Submission, spec: ModelSpec, adapter: int | None) -> str:
        # The colon keeps a tenant's salt from posing as an adapter's fingerprint.
        fingerprint = "" if adapter is None else spec.adapters[adapter].fingerprint
        return f"{fingerprint}:{submission.salt}"

    @classmethod
    def of(
        cls, submission: Submission, sequence: int, spec: ModelSpec, adapter: int | None = None
    ) -> Request:
        """Build the record of a submission to the model of `spec`, or to one of its adapters.

        `sequence`: number of the request in the order of receipt.
        """
        now = submission.arrival + submission.age
        since = submission.first_token_age
        return cls(
            submission,
            [*submission.prompt, *(submission.resumed or ())],
            Precedence(-submission.priority, submission.arrival, sequence),
            spec.name,
            adapter,
            cls.salt_of(submission, spec, adapter),
            shaped=submission.sampling.shaped,
            unscored=len(submission.prompt) if submission.prompt_logprobs is None else 1,
            first_token_at=None if since is None else now - since,
            last_token_at=None if since is None else now,
        )

    def continued(self, at: float) -> Submission:
        """Return the request as it goes on elsewhere at `at`, after the tokens that its client
        has."""
        submission, first = self.submission, self.first_token_at
        return replace(
            submission,
            resumed=tuple(self.output),
            age=at - submission.arrival,
            first_token_age=None if first is None else at - first,
        )

    @property
    def id(self) -> str:
        return self.submission.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.submission.prompt)

    @property
    def last_at(self) -> float:
        """Time of its last token; before the first: its arrival."""
        return self.submission.arrival if self.last_token_at is None else self.last_token_at

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds between its output tokens so far; 0 before the second."""
        first, last, n = self.first_token_at, self.last_token_at, self.generated
        return 0.0 if first is None or last is None or n < 2 else (last - first) / (n - 1)

    @property
    def most_tokens(self) -> int:
        """Bound of the tokens whose KV it needs; the last output token's is never computed."""
        return self.prompt_tokens + max(0, self.submission.max_tokens - 1)

    @property
    def prefix(self) -> tuple[Sequence[int], str]:
        """Tokens whose KV may come from the prefix cache, and their salt. Positions that are still
        to be scored are excluded: they need logits, which are not cached."""
        return self.tokens if self.scored else self.tokens[: self.unscored], self.salt

    @property
    def read_only(self) -> bool:
        """Whether it generates nothing: its prompt is only scored, embedded or cached."""
        return self.submission.max_tokens == 0

    @property
    def scored(self) -> bool:
        """Whether all requested prompt scores have been reported."""
        return self.unscored >= self.prompt_tokens

    @property
    def decoding(self) -> bool:
        return self.state is RequestState.RUNNING and self.computed == len(self.tokens) - 1 > 0

    def to(self, state: RequestState) -> None:
        """Change state; raises BrokenPromise for a transition that is not legal."""
        if state not in _LEGAL[self.state]:
            raise BrokenPromise(f"request {self.id}: {self.state.value} -> {state.value}")
        self.state = state
