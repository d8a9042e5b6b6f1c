"""Define the messages that submit, pause and withdraw requests, and that return their outputs.

Used by `OpenRequests` and `RemoteDevice` in the server, `Worker` and `OutgoingQueue` in a worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from ballast.core.event import (
    CancelledOutput,
    EmbeddingOutput,
    FailedOutput,
    FinishedOutput,
    Output,
    PromptScoresOutput,
    TokenOutput,
)
from ballast.core.request import Submission
from ballast.transport.decoding import MalformedMessage
from ballast.transport.worker_messages.message import WorkerMessage

# -- to the worker ------------------------------------------------------------------------------


class SubmitMsg(WorkerMessage, frozen=True):
    """Requests for the device, in order of arrival.

    A prompt or a grammar that several of them share is sent once, and is one object in the worker.
    """

    requests: tuple[Submission, ...]
    """The requests, without their prompts and grammars."""
    prompt_of: tuple[int, ...]
    """Index in `prompts` of each request's prompt."""
    grammar_of: tuple[int, ...]
    """Index in `grammars` of each request's grammar; -1: it has none."""
    prompts: tuple[tuple[int, ...], ...]
    grammars: tuple[str, ...]

    @classmethod
    def of(cls, submissions: Iterable[Submission]) -> SubmitMsg:
        """Pack requests, with shared prompts once.

        Prompts are shared where they are one object: comparing long ones would take longer.
        """
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
        """Unpack the requests. Raises MalformedMessage where an index is out of range."""
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


class WithdrawMsg(WorkerMessage, frozen=True):
    """Cancel requests whose client has left or needs no more output, or that move elsewhere."""

    request_ids: tuple[str, ...]


class FlowControlMsg(WorkerMessage, frozen=True):
    """Pause requests whose clients have stopped reading; resume those whose clients read again."""

    paused: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


# -- to the server ------------------------------------------------------------------------------


class _Wrapper(msgspec.Struct, frozen=True, array_like=True):
    """Base of outputs with a one-letter tag: dataclasses carry none, and there is one per token."""


class WrappedToken(_Wrapper, frozen=True, tag="t"):
    output: TokenOutput


class WrappedFinished(_Wrapper, frozen=True, tag="f"):
    output: FinishedOutput


class WrappedFailed(_Wrapper, frozen=True, tag="e"):
    output: FailedOutput


class WrappedCancelled(_Wrapper, frozen=True, tag="c"):
    output: CancelledOutput


class WrappedScores(_Wrapper, frozen=True, tag="s"):
    output: PromptScoresOutput


class WrappedEmbedded(_Wrapper, frozen=True, tag="v"):
    output: EmbeddingOutput


Wrapped = (
    WrappedToken
    | WrappedFinished
    | WrappedFailed
    | WrappedCancelled
    | WrappedScores
    | WrappedEmbedded
)

_WRAPPERS: dict[type, type[Wrapped]] = {
    TokenOutput: WrappedToken,
    FinishedOutput: WrappedFinished,
    FailedOutput: WrappedFailed,
    CancelledOutput: WrappedCancelled,
    PromptScoresOutput: WrappedScores,
    EmbeddingOutput: WrappedEmbedded,
}


class OutputsMsg(WorkerMessage, frozen=True):
    """Outputs of requests, in the order in which the loop produced them."""

    wrapped: tuple[Wrapped, ...]

    @classmethod
    def of(cls, outputs: Iterable[Output]) -> OutputsMsg:
        """Wrap outputs."""
        return cls(tuple(_WRAPPERS[type(o)](o) for o in outputs))  # type: ignore[arg-type]

    def unwrap(self) -> list[Output]:
        """Return the outputs."""
        return [w.output for w in self.wrapped]
