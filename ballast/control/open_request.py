"""Record one open request: what its client has, and what is needed to continue it elsewhere."""

from __future__ import annotations

from collections.abc import MutableSet
from dataclasses import dataclass, field, replace
from typing import Protocol

from ballast.control.timers import Timer
from ballast.core.errors import BrokenPromise
from ballast.core.event import EmbeddingOutput, Output, PromptScoresOutput, TokenOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission


class Outputs(Protocol):
    """Where the outputs of one client's requests go, in order."""

    @property
    def open(self) -> MutableSet[str]:
        """Ids of the requests that have not ended."""

    @property
    def paused(self) -> bool:
        """Whether the client does not read."""

    def put(self, output: Output) -> None:
        """Append an output."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request until its end, with the state needed to continue it in another worker."""

    submission: Submission
    stream: Outputs
    key: str = ""
    """Name of its API key where keys have fair shares of the worker; else empty."""
    activations_per_minute: int | None = None
    """Activations of models that its key may cause in a minute on each device; None: no bound."""
    sent: bool = False
    """Whether the present worker has it."""
    begun: bool = False
    """Whether the present device has generated a token of it and has a full block of its KV."""
    departing: bool = False
    """Whether it is moving to another device: its end at the present worker is not delivered."""
    paused: bool = False
    """Whether it is paused because its client does not read: it is not sent, or its worker has
    paused it."""
    resuming: bool = False
    """Whether its worker has paused it and is to resume it, which may wait until its key may have
    its model activated."""
    fresh: bool = True
    """Whether it has never been sent to a worker."""
    kv_waits: bool = False
    """Whether KV has been imported for it at its device, which has not got it yet."""
    accepted: bool = False
    """Whether it has been accepted: no queue limit may refuse it any more."""
    arrived: float | None = None
    """When it arrived, in seconds of the clock of `OpenRequests`; None: it is just coming."""
    first_token: float | None = None
    """When its client got its first token, on the same clock."""
    output_tokens: list[int] = field(default_factory=list)
    """Output tokens that the client has."""
    vocab: int | None = None
    """Number of its model's tokens; None: unknown."""
    expiry: Timer | None = None
    """Timer that fails it, if it has not been sent by then."""
    scored: int = 0
    """Leading prompt positions whose scores the client has; position 0, which has none, counts."""
    embedded: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the worker has it and has not paused it."""
        return self.sent and not (self.paused or self.resuming)

    def has_block(self, base: ModelSpec) -> bool:
        """Return whether the KV of all tokens but the last fills a block."""
        return len(self.submission.prompt) + len(self.output_tokens) > base.block_tokens

    def cancel_expiry(self) -> None:
        """Cancel the timer that fails the request for waiting too long."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def next_submission(self, now: float) -> Submission:
        """Build the submission for the present worker, which continues after the tokens that the
        client has; mark the request as sent."""
        submission = self.submission
        if self.accepted:
            assert self.arrived is not None, "it has been added"
            submission = replace(
                submission,
                resumed=tuple(self.output_tokens),
                age=now - self.arrived,
                first_token_age=None if self.first_token is None else now - self.first_token,
            )
        self.sent, self.fresh, self.accepted, self.kv_waits = True, False, True, False
        self.cancel_expiry()
        return submission

    def _check_tokens(self, output: TokenOutput) -> None:
        if self.vocab is not None:
            for token in (output.token, *(token for token, _ in output.top)):
                if not 0 <= token < self.vocab:
                    named = f"{output.request_id} was given token {token}"
                    raise BrokenPromise(f"{named}; {self.submission.model} has {self.vocab}")

    def undelivered_part(self, output: Output, now: float) -> Output | None:
        """Return the part of an output that the client does not have yet; None: it has all of it.

        Raises BrokenPromise for a gap in the tokens, and for a token outside of the vocabulary.
        """
        match output:
            case TokenOutput():
                self._check_tokens(output)
                if output.index < len(self.output_tokens):
                    return None
                if output.index > len(self.output_tokens):
                    known = len(self.output_tokens)
                    raise BrokenPromise(
                        f"token {output.index} of {output.request_id} came after {known}"
                    )
                self.output_tokens.append(output.token)
                if self.first_token is None:
                    self.first_token = now
            case PromptScoresOutput():
                end = output.start + len(output.logprobs)
                known = max(0, min(self.scored, end) - output.start)
                self.scored = max(self.scored, end)
                if known == len(output.logprobs) > 0:
                    return None
                if known:
                    return replace(
                        output,
                        start=output.start + known,
                        logprobs=output.logprobs[known:],
                        top=output.top[known:],
                    )
            case EmbeddingOutput():
                if self.embedded:
                    return None
                self.embedded = True
            case _:
                pass
        return output
