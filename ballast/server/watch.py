"""What is learnt of each HTTP request while it is answered, for metrics, traces and logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.core.clock import Clock
from ballast.server.metrics import Metrics
from ballast.server.openai import GenerateRequest
from ballast.server.responses import Usage
from ballast.server.timing import Timing

CODE = "ballast.code"
"""Key of the ASGI scope: the code of the error that was answered."""


class Answering(Protocol):
    """What generates an answer; `ballast.server.generation.Generation` does."""

    @property
    def model(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Sequence[Timing]: ...

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """By choice; None where it has not ended."""


@dataclass(slots=True)
class Note:
    """One HTTP request. Times are seconds on the server's clock."""

    method: str
    path: str
    headers: Headers
    began: float
    ended: float | None = None
    route: str | None = None
    """As the router writes it; None: there is no such route, or it was refused before."""
    status: int | None = None
    """None: the client was gone before anything was said."""
    code: str | None = None
    """Of the error that was answered."""
    streamed: bool = False
    request_id: str | None = None
    """Of the answer, as the client is told it."""
    request: GenerateRequest | None = None
    answer: Answering | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    """More that is worth telling: the name of the key, for one."""


_CURRENT: ContextVar[Note | None] = ContextVar("note", default=None)


def current() -> Note | None:
    """The note on the HTTP request being answered by this task; None outside of one."""
    return _CURRENT.get()


Listener = Callable[[Note], None]
"""Told of each request once it is over. It must neither wait nor raise."""


class Watch:
    """ASGI middleware around everything else."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, clock: Clock, listeners: Sequence[Listener] = ()
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._listeners = tuple(listeners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = Note(scope["method"], scope["path"], Headers(scope=scope), self._clock.now())
        _CURRENT.set(note)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                kind = Headers(raw=message["headers"]).get("content-type", "")
                if kind.startswith("text/event-stream"):
                    note.streamed = True
                    self._metrics.open_streams.inc()
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._over(note, scope)

    def _over(self, note: Note, scope: Scope) -> None:
        note.ended = self._clock.now()
        note.route = getattr(scope.get("route"), "path", None)
        note.code = scope.get(CODE)
        if note.streamed:
            self._metrics.open_streams.dec()
        # 499, as nginx says it: the client left before the answer began.
        status = 499 if note.status is None else note.status
        seconds = note.ended - note.began
        self._metrics.answered(note.route, note.method, status, note.code, seconds)
        for listener in self._listeners:
            listener(note)
