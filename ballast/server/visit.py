"""One HTTP request, from arrival to the end of its response: who asked, what became of it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.core.settings import KeySettings

if TYPE_CHECKING:
    from ballast.server.meter import Meter


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as keys tell."""

    key: KeySettings | None = None
    """None: nobody in particular, or the operator."""
    admin: bool = False
    known: bool = True
    """It showed a key that is right, or none was asked for."""

    @property
    def name(self) -> str:
        """For logs and metrics; empty where no key was needed."""
        return "admin" if self.admin else "" if self.key is None else self.key.name

    @property
    def salt(self) -> str:
        """Keeps its cached prefixes apart, where that is asked for."""
        return "" if self.key is None or not self.key.isolated else f"key:{self.key.name}"

    def may_use(self, model: str) -> bool:
        """Whether the model exists for it."""
        return self.key is None or self.key.models is None or model in self.key.models


ANYONE = Caller()
STRANGER = Caller(known=False)


@dataclass(slots=True, eq=False)
class Visit:
    """Filled in on the way by whoever learns something; read by the log at the end."""

    request_id: str = ""
    caller: Caller = ANYONE
    error: str = ""
    """Code of the error that was told, if one was."""
    meter: Meter | None = None
    """What models did for it, if they were asked."""


_visit: ContextVar[Visit] = ContextVar("visit")


def current() -> Visit:
    """That of the HTTP request being handled; outside of any, one that nobody reads."""
    return _visit.get(None) or Visit()


def begin(visit: Visit) -> None:
    """What this task, and those it starts, do from now on belongs to `visit`."""
    _visit.set(visit)
