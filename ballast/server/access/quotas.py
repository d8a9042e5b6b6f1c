"""Enforce the quotas of each API key: requests and tokens per minute, and open requests.

Used by `gate` (requests), `Service` (prompt tokens) and `meter` (output tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ballast.core.clock import Clock
from ballast.core.settings import KeySettings
from ballast.core.token_bucket import TokenBucket
from ballast.server.http.faults import Fault

OPEN_RETRY_SECONDS = 1.0
"""`Retry-After` in seconds where a request must end first, which cannot be predicted."""


class KeyQuotas:
    """Usage of all keys, by name. Limits are read from the key at each request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, int] = {}
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    @contextmanager
    def request(self, key: KeySettings | None) -> Iterator[Callable[[], None]]:
        """Count one request, which is open in the `with` block, or until what it yields is called:
        before the end of its answer is sent, since a client may ask again as soon as it has that.
        Raises Fault (429) where it exceeds the quota."""
        if key is None:
            yield lambda: None
            return
        already = self._open.get(key.name, 0)
        if key.concurrent is not None and already >= key.concurrent:
            what = f"{already} requests of the key {key.name!r} are open"
            raise _exceeded(f"{what}, the most it may have", OPEN_RETRY_SECONDS)
        self._spend(key, "requests", 1)
        self._open[key.name] = already + 1
        is_open = True

        def end() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._open[key.name] -= 1

        try:
            yield end
        finally:
            end()

    def prompt(self, key: KeySettings | None, tokens: int) -> None:
        """Charge a prompt's tokens before it is computed. Raises Fault (429) where they exceed the
        quota."""
        if key is not None:
            self._spend(key, "tokens", tokens)

    def output(self, key: KeySettings | None, tokens: int) -> None:
        """Charge generated tokens; where they exceed the quota, the next prompt waits for the
        debt."""
        if key is not None and key.tokens_per_minute is not None:
            self._bucket(key, "tokens", key.tokens_per_minute).spend(tokens)

    def headers(self, key: KeySettings | None) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's `x-ratelimit-*` headers with the rest of the key's quotas."""
        headers: list[tuple[bytes, bytes]] = []
        if key is None:
            return headers
        now = self._clock.now()
        for kind, limit in _limits(key).items():
            if limit is not None:
                bucket = self._bucket(key, kind, limit)
                left = max(0, int(bucket.level(limit, now)))
                reset = bucket.wait(limit, limit, now)
                for what, value in (
                    ("limit", limit),
                    ("remaining", left),
                    ("reset", f"{reset:.3f}s"),
                ):
                    headers.append((f"x-ratelimit-{what}-{kind}".encode(), str(value).encode()))
        return headers

    def _spend(self, key: KeySettings, kind: str, n: int) -> None:
        limit = _limits(key)[kind]
        if limit is None:
            return
        bucket = self._bucket(key, kind, limit)
        wait = bucket.wait(n, limit, self._clock.now())
        if wait > 0:
            what = f"the key {key.name!r} may use {limit} {kind} per minute"
            raise _exceeded(f"{what}; this needs {n}, in {wait:.1f} seconds", wait)
        bucket.spend(n)

    def _bucket(self, key: KeySettings, kind: str, limit: int) -> TokenBucket:
        made = self._buckets.get((key.name, kind))
        if made is None:
            made = self._buckets[key.name, kind] = TokenBucket(limit, self._clock.now())
        return made


def _limits(key: KeySettings) -> dict[str, int | None]:
    return {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}


def _exceeded(what: str, wait: float) -> Fault:
    return Fault(429, what, "rate_limit_exceeded", retry_after=wait)
