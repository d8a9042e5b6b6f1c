"""Requests: what a client asked for, and the life of it inside one device's engine."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen: a function of (logits, these, seed, position) alone."""

    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this times that of the likeliest."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output has."""
    frequency_penalty: float = 0.0
    """The same, once for each time that it has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    banned: tuple[int, ...] = ()
    """Tokens that cannot be chosen before `min_tokens` are there: those that end the output."""
    min_tokens: int = 0
    grammar: str = ""
    """What the output must follow, as llguidance writes grammars; empty: nothing."""
    seed: int = 0
    """Always set: the server draws one where the client gave none, and keeps it."""
    choice: int = 0
    """Index among the `n` choices of one request."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of so many of the likeliest; None: of none."""

    @property
    def shaped(self) -> bool:
        """Whether the logits are changed first, by the tokens so far or by the client's wishes."""
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
    """Of a model, or of an adapter."""
    prompt: tuple[int, ...]
    max_tokens: int
    """0: nothing is generated; it ends when the prompt has been computed."""
    open_ended: bool = False
    """The client named no `max_tokens`: it is the context's, lowered to what memory can hold."""
    sampling: Sampling = field(default_factory=Sampling)
    arrival: float = 0.0
    """Seconds on the device's clock; set by the inbox on receipt."""
    priority: int = 0
    """Higher comes first: the model's and the request's own together."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    salt: str = ""
    """Isolates prefix caches between tenants."""
    tenant: str = ""
    """The API key that it came with, by name: what is scarce is divided between tenants."""
    prompt_logprobs: int | None = None
    """Also tell the prompt's tokens' log-probabilities (`PromptScoresOutput`), with so many of the
    likeliest at each position; None: no."""
    embed: bool = False
    """The model's embedding of the prompt (`EmbeddingOutput`) is wanted: nothing is generated."""
    resumed: tuple[int, ...] | None = None
    """Not None: it was accepted before, by a worker that died or another device. The output goes on
    after these tokens, which the client has already, token for token as it would have."""
    age: float = 0.0
    """Seconds since it arrived there; its place and its service level go by that."""
    first_token_age: float | None = None
    """Seconds since its client got the first of them; None: it has none."""


class WaitsFor(enum.Flag):
    """What a request needs, beside memory and its turn, before it can go on."""

    NOTHING = 0
    GRAMMAR = enum.auto()
    """Its grammar is being compiled."""
    READER = enum.auto()
    """Its client does not read what has been generated."""


class RequestState(enum.Enum):
    """Where a request is."""

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
    """Who comes first where not all can: a total order of all requests of a device.

    The more important, then the earlier. Whoever is first of all is never undone for another.
    """

    rank: int
    """The negative of its priority."""
    arrival: float
    """Seconds on the device's clock."""
    sequence: int
    """Breaks ties, in the order in which the device heard of them."""


def next_due(due: float, first: float | None, generated: int, pace: float) -> float:
    """Return when a request's next token is due, in seconds on the device's clock: -inf where it
    cannot keep its service level any more.

    `due`: when its first token was due; `first`: when that came, None if it has not; `generated`:
    tokens so far; `pace`: seconds per token after the first that its service level allows.
    """
    if first is None:
        return due
    return first + generated * pace if first <= due else -math.inf


@dataclass(slots=True, eq=False)
class Request:
    """The engine's book of one request. Only `ballast.engine` writes it.

    `tokens` is prompt + output; KV exists for `tokens[:computed]`, in `blocks`. While a request
    decodes, exactly one token (the last) is not yet computed.
    """

    submission: Submission
    tokens: list[int]
    order: Precedence
    model: str
    """The model that runs it: of an adapter, the base."""
    adapter: int | None = None
    """Index into the model's adapters."""
    salt: str = ""
    """What keeps its cached prefixes apart from those of other adapters and tenants."""
    place: int = 0
    """In its model's queue (`ballast.core.actions.Reorder`)."""
    state: RequestState = RequestState.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    preemptions: int = 0
    in_flight: bool = False
    """Part of a job that has been started and has not ended."""
    cancelled: bool = False
    """Cancel arrived while in flight; takes effect when the job ends."""
    waits_for: WaitsFor = WaitsFor.NOTHING
    """Where not nothing, it is paused, or will be when the job in flight ends."""
    isolated: bool = False
    """Its last job failed with others in it: its next one has nobody else."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    shaped: bool = False
    """Its next token depends on its tokens so far (`Sampling.shaped`)."""
    unscored: int = 0
    """First position of the prompt whose score is asked for and not told; at the prompt's end, and
    where none is asked for: the number of the prompt's tokens."""
    admitted_at: float | None = None

    @staticmethod
    def salt_of(submission: Submission, spec: ModelSpec, adapter: int | None) -> str:
        # The colon keeps a tenant's salt from posing as an adapter's fingerprint.
        fingerprint = "" if adapter is None else spec.adapters[adapter].fingerprint
        return f"{fingerprint}:{submission.salt}"

    @classmethod
    def of(
        cls, submission: Submission, sequence: int, spec: ModelSpec, adapter: int | None = None
    ) -> Request:
        """For the model of `spec`, or for one of its adapters."""
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

    @property
    def id(self) -> str:
        return self.submission.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.submission.prompt)

    @property
    def last_at(self) -> float:
        """When its last token came; before the first: when it arrived."""
        return self.submission.arrival if self.last_token_at is None else self.last_token_at

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def seconds_per_token(self) -> float:
        """Between the tokens of its output so far, on average; 0 before the second."""
        first, last, n = self.first_token_at, self.last_token_at, self.generated
        return 0.0 if first is None or last is None or n < 2 else (last - first) / (n - 1)

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV it may ever need: the last generated token's is never computed."""
        return self.prompt_tokens + max(0, self.submission.max_tokens - 1)

    @property
    def prefix(self) -> tuple[Sequence[int], str]:
        """Tokens whose KV may come from the prefix cache, and their salt: what is still to be
        scored needs logits, which no cache has."""
        return self.tokens if self.scored else self.tokens[: self.unscored], self.salt

    @property
    def read_only(self) -> bool:
        """It generates nothing: its prompt is only scored, embedded or cached."""
        return self.submission.max_tokens == 0

    @property
    def scored(self) -> bool:
        """Whether every score that it asks for has been told."""
        return self.unscored >= self.prompt_tokens

    @property
    def decoding(self) -> bool:
        return self.state is RequestState.RUNNING and self.computed == len(self.tokens) - 1 > 0

    def to(self, state: RequestState) -> None:
        """Change state; raises BrokenPromise for a transition that is not legal."""
        if state not in _LEGAL[self.state]:
            raise BrokenPromise(f"request {self.id}: {self.state.value} -> {state.value}")
        self.state = state
