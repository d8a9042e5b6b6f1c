"""Keep the requests to models that are open, and those that ended last, for `/admin/requests`.

`request_watch` notes each HTTP request at its beginning and its end. Prompts, outputs and keys are
not kept.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType, structs

from ballast.core.clock import Clock
from ballast.server.http.request_context import RequestContext, RequestTexts

KEPT = 200
"""Ended requests that are kept."""
TRACED = 20_000
"""Answered requests of which time, model and lengths are kept, to be simulated."""


class TracedRequest(NamedTuple):
    """A request that was answered, as simulations ask it again."""

    at: float
    """When it arrived, in seconds on the server's clock."""
    model: str
    prompt_tokens: int
    output_tokens: int


class RequestNow(msgspec.Struct, frozen=True):
    """One request, now or at its end; times in seconds."""

    request_id: str
    key: str
    """Name of the API key; empty: none was needed."""
    model: str
    path: str
    state: Literal["waiting", "generating", "ended"]
    """`waiting`: it has no token yet; its model may have to be loaded first."""
    age: float
    """Since it arrived."""
    seconds: float | None
    """From its arrival to the end of its response; None: it is open."""
    queued: float | None
    """From its arrival at the worker to its admission there, known from its first token on."""
    activating: float | None
    """Part of `queued` during which the model's weights were coming."""
    ttft: float | None
    tpot: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int] | UnsetType
    """Where their KV was; unset where all of it was on the device."""
    choices: int
    status: int | None
    """HTTP status; None: nothing has been sent yet."""
    error: str | None
    finish: list[str]
    """Finish reasons of its choices, each once."""
    gone: bool
    """Whether its client left before the end."""
    texts: RequestTexts | UnsetType = UNSET
    """Set for the admin key, where `server.request_texts` is."""


class RequestList(msgspec.Struct, frozen=True):
    """The answer of `/admin/requests`."""

    open: list[RequestNow]
    """By arrival, the oldest first."""
    ended: list[RequestNow]
    """The latest first."""

    def without_texts(self) -> RequestList:
        """Return the same requests without their texts."""
        both = (self.open, self.ended)
        return RequestList(*([structs.replace(r, texts=UNSET) for r in part] for part in both))


class RecentRequests:
    """Requests to models that are open, and the last `KEPT` that ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[RequestContext, None] = {}
        self._ended: deque[tuple[float, RequestNow]] = deque(maxlen=KEPT)
        self._traced: deque[TracedRequest] = deque(maxlen=TRACED)

    def arrived(self, context: RequestContext) -> None:
        """Note an HTTP request that arrives."""
        self._open[context] = None

    def over(self, context: RequestContext) -> None:
        """Note that a request's response has ended, or that its client has left."""
        self._open.pop(context, None)
        if context.model:
            now = self._clock.now()
            ended = _described(context, now)
            self._ended.append((now, ended))
            if ended.prompt_tokens and ended.output_tokens:
                lengths = ended.prompt_tokens, ended.output_tokens
                self._traced.append(TracedRequest(context.began, ended.model, *lengths))

    @property
    def newest(self) -> object:
        """The request that ended last: another object whenever one more has ended."""
        return self._ended[-1] if self._ended else None

    def trace(self) -> list[TracedRequest]:
        """Return the last `TRACED` requests that were answered, in order of arrival."""
        return sorted(self._traced)

    def listed(self, last: int, texts: bool = False) -> RequestList:
        """Return all open requests, and the `last` that ended; `texts`: with those that are
        kept."""
        now = self._clock.now()
        opened = [_described(context, now) for context in self._open if context.model]
        ended = [
            structs.replace(one, age=round(one.age + now - at, 4))
            for at, one in list(self._ended)[max(0, len(self._ended) - last) :]
        ]
        found = RequestList(opened, ended[::-1])
        return found if texts else found.without_texts()


def _described(context: RequestContext, now: float) -> RequestNow:
    answer, ended = context.answer, context.ended
    timings = [] if answer is None else answer.timings
    usage = None if answer is None else answer.usage
    output = 0 if usage is None else usage.completion_tokens
    first = min((t.first for t in timings if t.first is not None), default=None)
    details = None if usage is None else usage.prompt_tokens_details
    waits = [(t.queued, t.activating) for t in timings if t.queued is not None]
    queued, activating = min(waits, default=(None, None))
    state: Literal["waiting", "generating", "ended"] = "waiting" if first is None else "generating"
    return RequestNow(
        request_id=context.request_id,
        key=context.caller.name,
        model=context.model if answer is None else answer.model,
        path=context.path,
        state=state if ended is None else "ended",
        age=round(now - context.began, 4),
        seconds=None if ended is None else _rounded(ended - context.began),
        queued=_rounded(queued),
        activating=_rounded(activating),
        ttft=None if first is None else _rounded(first - context.began),
        # Of several choices, no one pace is the request's.
        tpot=_rounded(timings[0].tpot(output)) if len(timings) == 1 else None,
        prompt_tokens=0 if usage is None else usage.prompt_tokens,
        output_tokens=output,
        cached_tokens=0 if details is None else details.cached_tokens,
        cached_tokens_by_tier=UNSET if details is None else details.cached_tokens_by_tier,
        choices=len(timings),
        status=None if ended is None and first is None else context.status,
        error=context.code,
        finish=sorted({r for r in ([] if answer is None else answer.finish_reasons) if r}),
        gone=context.gone,
        texts=UNSET if context.texts is None else context.texts,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
