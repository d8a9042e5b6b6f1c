"""Send requests to a running server over the OpenAI API: streamed completions of token ids.

`HttpTarget` is the `BenchmarkTarget` of `bench.run`. It also samples memory and decisions from
`/admin/state`, where the server has that route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx
import msgspec

from ballast.bench.record import RequestRecorder
from ballast.bench.replay import TargetError
from ballast.bench.sample import DecisionRecord, DeviceSample, decisions_of
from ballast.core.clock import Clock
from ballast.core.request import Submission
from ballast.server.observe.server_state import ServerNow


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class HttpTarget:
    """Sends to `base_url` (with or without `/v1`). An async context manager.

    Proxies of the environment are not used and connections not limited: what is measured is the
    server. Only the time until connected has a limit of its own; the rest is the replay's.
    """

    def __init__(
        self,
        base_url: str,
        clock: Clock,
        api_key: str | None = None,
        connect_seconds: float = 30.0,
    ) -> None:
        self._clock = clock
        self._unix_origin: float | None = None
        """Unix time at which `clock` showed 0; None until the server has shown its state."""
        self._decided: dict[bytes, dict[str, Any]] = {}
        """Decisions seen so far: the same one is shown by many samples."""
        self._device = ""
        """The name of the server's only device; empty where it has several."""
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=connect_seconds),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def __aenter__(self) -> HttpTarget:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    @property
    def clock(self) -> Clock:
        return self._clock

    async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
        """One streamed completion. Raises TargetError for anything but a complete answer."""
        try:
            await self._stream(submission, recorder)
        except httpx.HTTPError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        except msgspec.MsgspecError as error:
            raise TargetError(f"the stream holds something else than chunks: {error}") from error

    async def _stream(self, submission: Submission, recorder: RequestRecorder) -> None:
        chunks, usage, done = 0, None, False
        body = _body(submission)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise TargetError(_refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    done = True
                    continue
                chunk = _decode(data)
                if chunk.error is not None:
                    raise TargetError(chunk.error.message)
                if any(c.text or c.finish_reason is None for c in chunk.choices):
                    recorder.token(submission.id, self._clock.now())
                    chunks += 1
                usage = chunk.usage or usage
        if not done:
            raise TargetError("the stream ended before [DONE]")
        now = self._clock.now()
        if usage is None:
            recorder.finished(submission.id, now, len(submission.prompt), chunks)
            return
        details = usage.prompt_tokens_details or _Details()
        recorder.finished(
            submission.id,
            now,
            usage.prompt_tokens,
            usage.completion_tokens,
            details.cached_tokens or 0,
        )

    async def memory(self) -> Mapping[str, DeviceSample]:
        """Each device, from `/admin/state`; empty where the server has no such route."""
        try:
            response = await self._client.get("/admin/state")
            response.raise_for_status()
            now = msgspec.json.decode(response.content, type=ServerNow)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return {}
        self._unix_origin = now.time - self._clock.now()
        self._device = now.devices[0].device if len(now.devices) == 1 else ""
        self._decided |= {msgspec.json.encode(entry): entry for entry in now.decisions}
        return {d.device: DeviceSample.of(d) for d in now.devices}

    async def decisions(self, origin: float) -> Sequence[DecisionRecord]:
        """Those that `/admin/state` has shown: at each sample the last 50, on its wall clock.

        `/admin/story` shows more, but only to whom has the admin key.
        """
        await self.memory()
        if self._unix_origin is None:
            return ()
        timed = ({**entry, "at": entry["time"]} for entry in self._decided.values())
        found = decisions_of(timed, self._device, self._unix_origin + origin)
        return [d for d in found if d.at >= 0]


def _body(submission: Submission) -> dict[str, object]:
    return {
        "model": submission.model,
        "prompt": list(submission.prompt),
        "max_tokens": submission.max_tokens,
        "temperature": submission.sampling.temperature,
        "seed": submission.sampling.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": submission.ignore_eos,
    }


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _decode(body).error
    except msgspec.MsgspecError:
        error = None
    message = error.message if error is not None else body[:200].decode(errors="replace")
    return f"HTTP {status}: {message}"
