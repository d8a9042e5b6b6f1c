"""Define `RequestContext`, the record of one HTTP request from arrival to the end of its response.

`observe.request_watch` attaches it to the ASGI scope; middleware, routes and `Service` fill it in;
metrics, traces and the log read it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from ballast.core.settings import KeySettings
from ballast.server.http.bodies import SMALL_BYTES

if TYPE_CHECKING:
    from ballast.server.observe.latency import Timing
    from ballast.server.openai.records import Usage
    from ballast.server.openai.request import GenerateRequest


MESSAGES = "/v1/messages"
"""Path of the Messages API."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as keys tell."""

    key: KeySettings | None = None
    """None: nobody in particular, or the operator."""
    admin: bool = False
    known: bool = True
    """It showed a key that is right, or none was asked for."""
    apart: bool = False
    """There are several keys: their cached prefixes are kept apart unless they say otherwise."""

    @property
    def name(self) -> str:
        """For logs and traces; empty where no key was needed."""
        return "admin" if self.admin else "" if self.key is None else self.key.name

    @property
    def salt(self) -> str:
        """Keeps its cached prefixes apart from those of other keys; empty: they are shared."""
        if self.key is None:
            return ""
        isolated = self.apart if self.key.isolated is None else self.key.isolated
        return f"key:{self.key.name}" if isolated else ""

    def may_use(self, model: str) -> bool:
        """Whether the model exists for it."""
        return self.key is None or self.key.models is None or model in self.key.models


ANYONE = Caller()
STRANGER = Caller(known=False)


class ObservedAnswer(Protocol):
    """What metrics, traces and the log need of an answer; `ballast.server.generate.answer` and its
    kinds provide it."""

    @property
    def model(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Sequence[Timing]: ...

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """By choice; None where it has not ended."""

    def log_fields(self, arrived: float) -> dict[str, Any]:
        """Return the fields of the log line; `arrived`: of the HTTP request, in seconds on the
        server's clock."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """Filled in on the way by whoever learns something; read at the end by metrics, traces and the
    log. Times are seconds on the server's clock."""

    method: str = ""
    path: str = ""
    headers: Headers = field(default_factory=Headers)
    began: float = 0.0
    ended: float | None = None
    request_id: str = ""
    """The client's own, or one of ours; every response carries it."""
    caller: Caller = ANYONE
    body_bytes: int = 0
    """Length of the request's body."""
    route: str | None = None
    """As the router writes it; None: there is no such route, or it was refused before."""
    status: int = 499
    """As nginx says it, until there is one: the client was gone before anything was said."""
    code: str | None = None
    """Of the error that was told, if one was; in a stream that had begun well, perhaps."""
    streamed: bool = False
    gone: bool = False
    """The client left before the response was complete."""
    request: GenerateRequest | None = None
    answer_id: str | None = None
    answer: ObservedAnswer | None = None
    """What models generate for it; None: no model was asked."""

    @property
    def large_body(self) -> bool:
        """Whether going through what the body holds may take too long for the event loop."""
        return self.body_bytes > SMALL_BYTES

    @property
    def speaks_messages(self) -> bool:
        """Whether its client speaks Anthropic's Messages API: errors have another envelope there,
        whatever refuses the request."""
        return self.path == MESSAGES or self.path.startswith(f"{MESSAGES}/")


_KEY = "ballast.request"


def attach_context(scope: Scope, context: RequestContext) -> None:
    """Make `context` the one of an ASGI scope, where every middleware and route finds it."""
    scope[_KEY] = context


def context_of(scope: Scope) -> RequestContext:
    """Return the context of an ASGI scope; a new one where no middleware has attached one."""
    found = scope.setdefault(_KEY, RequestContext())
    assert isinstance(found, RequestContext)
    return found
