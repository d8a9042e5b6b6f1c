"""Define `RequestContext`, the record of one HTTP request from arrival to the end of its response.

`observe.request_watch` attaches it to the ASGI scope; middleware, routes and `Service` fill it in;
metrics, traces and the log read it at the end.
"""

from __future__ import annotations

import re
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


LEFT_OUT = b"x-ballast-left-out"
"""Response header that names what a request was answered without."""
_MOST_NAMED, _MOST_NAME = 16, 128
"""Most names in that header, and most characters of each."""
_UNSAFE = re.compile(r"[^\w.:/ -]", re.ASCII)

_OLLAMA = "chat generate embed embeddings tags show ps version pull push create copy delete"
OLLAMA = frozenset(f"/api/{name}" for name in _OLLAMA.split())
"""Paths of Ollama's API, also those that are not served."""
MESSAGES = "/v1/messages"
"""Path of the Messages API."""
ACTIVATIONS_PER_MINUTE = 30
"""Activations that each of several keys may cause in a minute on each device, by default."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as identified by its key."""

    key: KeySettings | None = None
    """The API key; None for a caller without one, and for the admin key."""
    admin: bool = False
    known: bool = True
    """Whether it sent a valid key, or none is required."""
    apart: bool = False
    """Whether there are several keys: their cached prefixes are then separate unless a key's
    settings differ."""

    @property
    def name(self) -> str:
        """Name for logs and traces; empty where no key was needed."""
        return "admin" if self.admin else "" if self.key is None else self.key.name

    @property
    def salt(self) -> str:
        """Salt that separates the key's cached prefixes from those of other keys; empty: they are
        shared."""
        if self.key is None:
            return ""
        isolated = self.apart if self.key.isolated is None else self.key.isolated
        return f"key:{self.key.name}" if isolated else ""

    def salted(self, cache_salt: str | None) -> str:
        """Salt of a request with its own `cache_salt`. No key's name has the separator, so no two
        pairs share a salt."""
        return self.salt if cache_salt is None else f"{self.salt}\0{cache_salt}"

    @property
    def activations_per_minute(self) -> int | None:
        """Models that its requests may have activated in a minute, on each device; None: any."""
        if self.key is None:
            return None
        by_default = ACTIVATIONS_PER_MINUTE if self.apart else None
        return self.key.activations_per_minute or by_default

    def may_use(self, model: str) -> bool:
        """Whether the caller's key gives access to a model."""
        return self.key is None or self.key.models is None or model in self.key.models


ANYONE = Caller()
STRANGER = Caller(known=False)


class ObservedAnswer(Protocol):
    """The attributes of an answer that metrics, traces and the log read; implemented by
    `ballast.server.generate.answer` and its subclasses."""

    @property
    def model(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Sequence[Timing]: ...

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """Finish reason of each choice; None where it has not ended."""

    def log_fields(self, arrived: float) -> dict[str, Any]:
        """Return the fields of the log line; `arrived`: when the HTTP request arrived, in seconds
        on the server's clock."""


MOST_SHOWN = 2000
"""Characters that are kept of a text."""


@dataclass(slots=True)
class RequestTexts:
    """The ends of a request's prompt and output, where the operator has them kept."""

    prompt: str
    """The first prompt's."""
    output: str = ""
    """Of all choices, in the order in which it came."""

    def add(self, text: str) -> None:
        """Add a part of the output."""
        self.output = (self.output + text)[-MOST_SHOWN:]


@dataclass(slots=True, eq=False)
class RequestContext:
    """Record of one HTTP request. Middleware, routes and `Service` fill it in; metrics, traces and
    the log read it at the end. Times are seconds on the server's clock."""

    method: str = ""
    path: str = ""
    headers: Headers = field(default_factory=Headers)
    began: float = 0.0
    ended: float | None = None
    request_id: str = ""
    """Id from the client's header, or a new one; every response carries it."""
    caller: Caller = ANYONE
    admitted: bool = False
    """Whether the caller may use the route, which is not open to strangers."""
    body_bytes: int = 0
    """Length of the request's body."""
    route: str | None = None
    """The route's path pattern; None: there is no such route, or the request was refused before."""
    status: int = 499
    """HTTP status; until there is one, 499 as in nginx: the client left before any response."""
    code: str | None = None
    """Code of the error that was sent, if any; in a stream, it may follow a good beginning."""
    streamed: bool = False
    gone: bool = False
    """Whether the client left before the response was complete."""
    model: str = ""
    """Model that it asks for, as its client wrote it; empty: none."""
    request: GenerateRequest | None = None
    left_out: Sequence[str] = ()
    """Parts of the request that it is answered without, such as tools of kinds that cannot run."""
    texts: RequestTexts | None = None
    """None: they are not kept."""
    answer_id: str | None = None
    answer: ObservedAnswer | None = None
    """Answer of the model; None: no model got the request."""

    @property
    def left_out_header(self) -> bytes:
        """Value of the header LEFT_OUT; empty where nothing was left out. Clients choose the names:
        characters that a header may not have are replaced."""
        named = dict.fromkeys(_UNSAFE.sub("_", name[:_MOST_NAME]) for name in self.left_out)
        more = len(named) - _MOST_NAMED
        shown = [*named][:_MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
        return ", ".join(shown).encode()

    @property
    def large_body(self) -> bool:
        """Whether processing the values of the body may take too long for the event loop."""
        return self.body_bytes > SMALL_BYTES

    @property
    def speaks_messages(self) -> bool:
        """Whether the client uses Anthropic's Messages API, whose errors have another envelope."""
        return self.path == MESSAGES or self.path.startswith(f"{MESSAGES}/")

    @property
    def speaks_ollama(self) -> bool:
        """Whether the client uses Ollama's API, whose errors have another envelope."""
        return self.path in OLLAMA


_KEY = "ballast.request"


def attach_context(scope: Scope, context: RequestContext) -> None:
    """Store `context` in an ASGI scope, where all middleware and routes find it."""
    scope[_KEY] = context


def context_of(scope: Scope) -> RequestContext:
    """Return the context of an ASGI scope; creates one where no middleware has attached one."""
    found = scope.setdefault(_KEY, RequestContext())
    assert isinstance(found, RequestContext)
    return found


def was_admitted(scope: Scope) -> bool:
    """Whether the request of an ASGI scope has been admitted so far."""
    found = scope.get(_KEY)
    return isinstance(found, RequestContext) and found.admitted
