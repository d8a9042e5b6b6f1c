"""Poll a server's `/admin/state`, and derive tokens per second from successive readings.

Used by `top`. Reads only: it never changes the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType

import httpx
import msgspec

from ballast.core.errors import BallastError
from ballast.server.observe.server_state import ServerNow

TIMEOUT_SECONDS = 20.0
KEPT = 200
"""Most rates of the whole server that are kept, for the sparkline."""


class Unreadable(BallastError):
    """The server's state cannot be read; the message gives the reason, and what may help."""


class Reader:
    """Reads the state of one server over HTTP."""

    def __init__(self, url: str, key: str | None) -> None:
        """`url`: with or without the `/v1` that clients of the API use."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._has_key = bool(key)
        self._client = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_SECONDS)

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def document(self) -> bytes:
        """Return `/admin/state` as one line of JSON. Raises Unreadable."""
        try:
            response = await self._client.get(f"{self.url}/admin/state")
        except httpx.TimeoutException:
            raise Unreadable(f"no answer within {TIMEOUT_SECONDS:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"{error}" or type(error).__name__
            raise Unreadable(f"the server cannot be reached ({why})") from None
        match response.status_code:
            case 200:
                return response.content
            case 401 | 403 if self._has_key:
                raise Unreadable("the server does not accept this key here; use the admin key")
            case 401 | 403:
                raise Unreadable("the server wants a key: --key, or BALLAST_ADMIN_KEY")
            case status:
                raise Unreadable(f"GET /admin/state: status {status}")

    async def read(self) -> ServerNow:
        """Return the state of the server. Raises Unreadable."""
        return decoded(await self.document())


def decoded(document: bytes) -> ServerNow:
    """Decode a server's state. Raises Unreadable for any other document."""
    try:
        return msgspec.json.decode(document, type=ServerNow)
    except msgspec.DecodeError as error:
        raise Unreadable(f"this is no Ballast, or one of another version ({error})") from None


class Rates:
    """Output tokens per second between the last two readings of a server."""

    def __init__(self) -> None:
        self.by_name: Mapping[str, float] = {}
        """Rate of each name; empty until there are two readings."""
        self.totals: deque[float] = deque(maxlen=KEPT)
        """Rates of all names together, oldest first."""
        self._last: tuple[float, Mapping[str, int]] | None = None

    @property
    def total(self) -> float | None:
        """Rate of all names together; None until there are two readings."""
        return self.totals[-1] if self.by_name else None

    def add(self, now: ServerNow) -> None:
        """Add a reading. Rates begin anew where the server has restarted."""
        tokens = {n.name: n.tokens for m in now.models for n in m.names}
        last, self._last = self._last, (now.uptime, tokens)
        if last is None or now.uptime <= last[0]:
            self.by_name = {}
            return
        seconds = now.uptime - last[0]
        # A model that has just been added, perhaps under a name that was in use, counts from 0.
        self.by_name = {
            name: max(0, count - last[1].get(name, 0)) / seconds for name, count in tokens.items()
        }
        self.totals.append(sum(self.by_name.values()))
