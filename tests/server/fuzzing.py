"""Requests that no client should send, thousands of them, and what a server answers to each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

import httpx

from tests.server.process import DEADLINE

CONNECTIONS = 8
MESSAGES_ERROR = ("error", {"type", "message"})

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
BLOCK = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": 1}]}
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**300),
    *(0.0, 0.5, 1.0, -0.1, 2.0001, 1e308, 5e-324, float("nan"), float("inf")),
    *("", "a", "\x00", "\ufeff", "\ud800", "🛳️" * 40, "a" * 3000, "auto", "none", "required"),
    *([], [[]], [None], [""], ["a"], [0], [1.5], [-1], [2**40], [[1, 2], [3]], ["a", 1], [True]),
    *({}, {"": None}, {"a": {"b": []}}, {"type": "text"}, {"include_usage": "x"}, {"0": 100}),
    *({"-5": 1e9}, {"99999999": 1}, {"1": "a"}, {"1": float("nan")}),
    *([{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": ""}]),
    *([{"role": "assistant", "content": None, "tool_calls": [CALL]}], [{"role": "tool"}]),
    *([{"content": "x"}], [{"role": "user", "content": "x", "tool_calls": 5}], [[{}]]),
    *([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}], [{"type": []}]),
    *([{"role": "user", "content": [{"type": "image"}]}], [{"type": "input_text", "text": "x"}]),
    *([{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}], [BLOCK]),
    *([{"role": "user", "content": [RESULT]}], [{"name": "f", "input_schema": {"type": "x"}}]),
    *({"type": "any"}, {"type": "tool"}, {"type": "allowed_tools", "mode": "auto", "tools": [1]}),
    *({"format": {"type": "json_schema"}}, {"format": 1}, [{"type": "function", "name": "\ud800"}]),
    *([TOOL], [TOOL] * 300, [{**TOOL, "type": "other"}], [{"type": "function"}]),
    *({"type": "function", "function": {"name": "g"}}, {"type": "function"}),
    *({"type": "json_object"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 1}),
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no such"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/$defs/x"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"pattern": "(", "type": []}}},
)
"""Values for any field."""

HEADERS: tuple[dict[str, str], ...] = (
    {"content-type": "text/plain"},
    {"content-type": ""},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "application/json; charset=utf-16"},
    {"content-encoding": "gzip"},
    {"x-request-id": "\xff" * 300},
    {"authorization": "Bearer \xe9"},
    {"authorization": "Basic"},
    {"accept": "image/png"},
    {"range": "bytes=0-1"},
    {"expect": "200-maybe"},
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "SEARCH")
PLACES = (
    *(
        "/",
        "//",
        "/v1",
        "/v1/",
        "/v1/models/",
        "/v1/models/%00",
        "/v1/models/%ff%fe",
        "/v1//models",
    ),
    *(
        "/v1/models/" + "a" * 4000,
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e/x",
        "/v1/models/a/b",
    ),
    *("/admin", "/admin/", "/admin/models/", "/admin/models/%00", "/admin/models/no/one/evict"),
    *("/admin/models/nobody/pin", "/admin/models//unpin", "/admin/models/atlas-chat/evict"),
    *("/admin/models/atlas-chat/pin", "/admin/models/atlas-chat/unpin", "/admin/models/pin"),
    *(
        "/admin/story?last=-1",
        "/admin/story?last=1e9",
        "/admin/story?model=%00",
        "/admin/story?last=3",
    ),
    *("/admin/models/scratch?patience=0", "/admin/models/scratch?patience=nan", "/metrics?x=%zz"),
    *("/admin/state", "/metrics", "/health", "/live", "/openapi.json", "/docs", "/favicon.ico"),
    *("/v1/chat/completions", "/v1/completions/", "/V1/completions", "/tokenize?model=x", "/%"),
)
"""Where bodies are not the point."""


@dataclass(frozen=True)
class Shot:
    """One request."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


class Marksman:
    """Makes shots, from sound bodies by path; the same ones for the same seed."""

    def __init__(
        self,
        sound: Mapping[str, Mapping[str, Any]],
        seed: int,
        headers: Mapping[str, str] | None = None,
        **fixed: Any,
    ) -> None:
        """`sound` bodies by method and path; `headers` are sent with all; `fixed` fields replace
        those that a sound body has."""
        self._sound = sound
        self._fixed_headers = dict(headers or {})
        self._fixed = fixed
        self._random = random.Random(seed)
        self._fields = sorted({field for body in sound.values() for field in body})

    def shots(self, n: int) -> Iterator[Shot]:
        """To routes that take a body."""
        for _ in range(n):
            path = self._random.choice(list(self._sound))
            body = self._damaged(self._encoded(self._odd(path)))
            odd = self._random.random() < 0.05
            headers = {"content-type": "application/json"}
            odd_headers = self._random.choice(HEADERS) if odd else {}
            method, _, where = path.partition(" ")
            yield Shot(method, where, body, headers | self._fixed_headers | odd_headers)

    def strays(self, n: int) -> Iterator[Shot]:
        """Any method anywhere."""
        for _ in range(n):
            place, method = self._random.choice(PLACES), self._random.choice(METHODS)
            body = self._encoded(self._value()) if self._random.random() < 0.3 else b""
            odd = self._random.choice(HEADERS) if self._random.random() < 0.2 else {}
            yield Shot(method, place, body, {**self._fixed_headers, **odd})

    def _odd(self, path: str) -> Any:
        """A sound body, of which up to four fields are gone or hold something nasty."""
        if self._random.random() < 0.02:
            return self._random.choice(NASTY)
        body = {k: v for k, v in self._sound[path].items() if self._random.random() < 0.6}
        for name in ("model", "prompt", "messages", "input"):
            if name in self._sound[path] and self._random.random() < 0.95:
                body[name] = self._sound[path][name]
        for _ in range(self._random.choice((0, 1, 1, 2, 4))):
            body[self._random.choice(self._fields)] = self._value()
        if self._random.random() < 0.1:
            body[f"unknown{self._random.randrange(9)}"] = self._value()
        return body | {k: v for k, v in self._fixed.items() if k in self._sound[path]}

    def _value(self) -> Any:
        value = self._random.choice(NASTY)
        return [value] * self._random.randrange(4) if self._random.random() < 0.1 else value

    def _encoded(self, body: Any) -> bytes:
        text = json.dumps(body, ensure_ascii=self._random.random() < 0.9)
        coding = self._random.choices(("utf-8", "utf-16", "utf-32", "utf-7"), (97, 1, 1, 1))[0]
        return text.encode(coding, "surrogatepass" if coding != "utf-7" else "replace")

    def _damaged(self, body: bytes) -> bytes:
        r = self._random
        at = r.randrange(len(body) + 1)
        match r.randrange(24):
            case 0:
                return body[:at]
            case 1:
                return body[:at] + r.randbytes(r.randrange(1, 9)) + body[at:]
            case 2:
                return body[:at] + b"\xff\xfe\xed\xa0\x80" + body[at:]
            case 3:
                return b"\xef\xbb\xbf" + body
            case 4:
                return body.replace(b"1", b"1" * r.choice((20, 400, 5000)), 1)
            case 5:
                return body.replace(b"null", _nested(r.choice((50, 1000, 100_000))), 1)
            case 6:
                return body[:-1] + b"," + body[1:]
            case _:
                return body


@dataclass(frozen=True)
class Hit:
    """What came of a shot. `status` 0: no answer."""

    shot: Shot
    status: int
    text: str


def fire(url: httpx.URL, shots: Iterable[Shot]) -> list[Hit]:
    """All of them, over a few connections at a time."""
    left = list(shots)[::-1]
    hits: list[Hit] = []

    def gun() -> None:
        connection = HTTPConnection(url.host, url.port or 80, timeout=DEADLINE)
        with closing(connection), suppress(IndexError):  # none is left
            while True:
                shot = left.pop()
                headers = {k: v.encode("latin-1") for k, v in shot.headers.items()}
                try:
                    connection.request(shot.method, shot.path, shot.body, headers)
                    answer = connection.getresponse()
                    text = answer.read().decode(errors="replace")
                    hits.append(Hit(shot, answer.status, text))
                except (OSError, HTTPException) as error:
                    connection.close()
                    hits.append(Hit(shot, 0, repr(error)))

    with ThreadPoolExecutor(CONNECTIONS) as guns:
        for done in [guns.submit(gun) for _ in range(CONNECTIONS)]:
            done.result()
    return hits


def broken(hits: Sequence[Hit]) -> list[str]:
    """What must not be: no answer, a fault of the server, or an error that says nothing."""
    return [f"{h.status}: {h.text[:500]}\n{h.shot}" for h in hits if not _sound(h)]


def _sound(hit: Hit) -> bool:
    if not 200 <= hit.status < 500:
        return False
    if hit.status >= 400:
        return hit.shot.method == "HEAD" or _explained(hit.text)
    if hit.text.startswith("event: message_start"):
        return hit.text.endswith('{"type":"message_stop"}\n\n')
    if hit.text.startswith(("data: ", "event: response", ": ping")):
        *events, end, last = hit.text.split("\n\n")
        return (end, last) == ("data: [DONE]", "") and all('"error"' not in e[:12] for e in events)
    return True


def _explained(text: str) -> bool:
    """Whether a body is an error as OpenAI's are, as Anthropic's, or as Ollama's."""
    try:
        body = json.loads(text)
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return False
    if isinstance(error, str):
        return bool(error) and body.keys() == {"error"}
    named = {"type", "param", "code"} <= set(error)
    return bool(error["message"]) and (named or (body.get("type"), set(error)) == MESSAGES_ERROR)
