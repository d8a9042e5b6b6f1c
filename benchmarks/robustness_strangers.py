"""What strangers and greedy clients do: silent connections, web pages, spellings of paths, answers
that are as large as may be.

Each attack is (name, what is expected, what does it, whether a witness must not notice).
"""

from __future__ import annotations

import contextlib
import http.client
import random
import resource
import socket
import subprocess
from collections.abc import Callable
from typing import Any

from ballast.bench.server_process import serving
from benchmarks.robustness_operators import BALLAST
from benchmarks.robustness_target import (
    MODEL,
    PART_KEY,
    PATIENCE_SECONDS,
    VICTIM_KEY,
    Target,
    statuses,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "a"}]
SILENT, ROUNDS = 8300, 20
QUOTED = 7 << 20
ROUTES = ("/metrics", "/admin/state", "/admin/models", "/admin/story")
SUFFIXES = ("", "%0A", "%00", "%0D%0A", "%7F", "%E2%80%A8", "/", "//", ";x", "..%2f", "/.", "%20")


def largest_answer(target: Target) -> str:
    """128 choices with 20 alternatives of each token: as many tokens as fit, then more."""
    body = {"model": MODEL, "messages": TURNS, "n": 128, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    full, answer = target.post(CHAT, body)
    tokens = answer["usage"]["completion_tokens"] if full == 200 else answer
    more, refusal = target.post(CHAT, {**body, "max_tokens": 200})
    code = refusal["error"]["code"]
    seen = f"{full} with {tokens} tokens; 25,600 tokens: {more} {code}"
    assert (full, more, code) == (200, 400, "answer_too_large"), seen
    return seen


def scored_echoes(target: Target) -> str:
    """Prompts that come back with 20 alternatives of each token: as many as fit, then more."""

    def ask(prompts: int) -> tuple[int, Any]:
        prompt = [_drawn(i, 150) for i in range(prompts)]
        scored = {"echo": True, "logprobs": 20, "max_tokens": 1}
        return target.post(TEXT, {"model": MODEL, "prompt": prompt, **scored})

    (few, _), (many, refusal) = ask(64), ask(128)
    code = refusal["error"]["code"]
    seen = f"64 prompts {few}, 128 prompts {many} {code}"
    assert (few, many, code) == (200, 400, "answer_too_large"), seen
    return seen


def large_errors(target: Target) -> str:
    """Errors about fields of 7 MB."""
    texts: tuple[dict[str, Any], ...] = (
        {"seed": "x" * QUOTED},
        {"logit_bias": {"9" * QUOTED: "x"}},
        {"x" * QUOTED: 1, "seed": -0.5},
    )
    found = [target.post(CHAT, {"model": MODEL, "messages": TURNS, **text}) for text in texts]
    longest = max(len(str(answer)) for _, answer in found)
    seen = f"{statuses(found)}, at most {longest} characters"
    assert all(400 <= status < 500 for status, _ in found), seen
    assert longest < 10_000, seen
    return seen


def silent_connections(target: Target) -> str:
    """More connections than there may be, which say nothing, while others ask with their key."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silent: list[socket.socket] = []
    try:
        for _ in range(min(SILENT, hard - 512)):
            silent.append(target.connect(b""))
        found = [target.complete(VICTIM_KEY) for _ in range(ROUNDS)]
    finally:
        for each in silent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    seen = f"{len(silent)} connections; with a key {statuses(found)}"
    assert all(status == 200 for status, _ in found), seen
    return seen


def spelled_paths(target: Target) -> str:
    """Routes of all models, spelled in other ways, with a key of one model and without."""
    opened = []
    for route in ROUTES:
        for path in (*(route + suffix for suffix in SUFFIXES), route.upper(), f"/{route}"):
            for key in (PART_KEY, "", "sk-wrong-wrong-wrong"):
                status, _ = target.ask("GET", path, key=key)
                if status < 300 or status >= 500:
                    opened.append((path, key, status))
    assert not opened, f"{opened[:5]}"
    return f"{len(ROUTES) * (len(SUFFIXES) + 2)} spellings, none opens"


def salted_prefixes(target: Target) -> str:
    """Users of one key, each with a salt, ask what another asked."""
    prompt = _drawn(1011, 200)

    def cached(salt: str | None) -> int:
        status, answer = target.complete(prompt=prompt, cache_salt=salt)
        assert status == 200, f"{status}: {answer!s:.90}"
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached("alice")
    own, others = cached("alice"), [cached("bob"), cached(None), cached("alic"), cached("alice ")]
    seen = f"its own salt finds {own} tokens, others {others}"
    assert own > 0, seen
    assert others == [0] * 4, seen
    return seen


def web_pages(target: Target) -> str:
    """What pages elsewhere make a browser send to a server without keys."""
    plain = target.fleet_file.read_text().partition("\nserver:")[0]
    file = target.fleet_file.with_name("pages.yaml")
    file.write_text(plain)
    found: dict[str, int] = {}
    with serving(file, "--no-changes", "--log-level", "error") as running:
        second = Target(running.url, running.pid, file, target.log)
        own = f"http://{second.host}:{second.port}"
        page = {"Origin": "http://evil.example"}
        for name, method, path, headers in (
            ("rebound", "POST", TEXT, {"Host": "evil.example", **page}),
            ("rebound state", "GET", "/admin/state", {"Host": "evil.example:8000"}),
            ("rebound name", "GET", "/v1/models", {"Host": "127.0.0.1.evil.example"}),
            ("foreign", "POST", TEXT, page),
            ("null", "POST", TEXT, {"Origin": "null"}),
            ("plain text", "POST", TEXT, {"Content-Type": "text/plain"}),
            ("own", "POST", TEXT, {"Origin": own}),
        ):
            found[name] = _status(second, method, path, headers)
    file.write_text(plain + '\nserver: {cors_origins: ["*"]}\n')
    ended = subprocess.run(
        (*BALLAST, "serve", str(file), "--port", "0", "--no-changes"),
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    seen = f"{found}; any origin without keys: exit code {ended.returncode}"
    assert [*found.values()] == [421, 421, 421, 403, 403, 400, 200], seen
    assert ended.returncode == 2, seen
    return seen


def _drawn(seed: int, n: int) -> list[int]:
    """Tokens of a prompt that no other one begins like."""
    draw = random.Random(seed)
    return [draw.randrange(100, 200) for _ in range(n)]


def _status(target: Target, method: str, path: str, headers: dict[str, str]) -> int:
    body = b'{"model": "%b", "prompt": "a", "max_tokens": 1}' % MODEL.encode()
    connection = http.client.HTTPConnection(target.host, target.port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        kind = {"Content-Type": "application/json"}
        connection.request(method, path, body if method == "POST" else None, {**kind, **headers})
        return connection.getresponse().status


STRANGER_ATTACKS: tuple[tuple[str, str, Callable[[Target], str], bool], ...] = (
    ("the largest answer", "200, more is refused", largest_answer, True),
    ("scored prompts come back", "200, more is refused", scored_echoes, True),
    ("errors about 7 MB", "they quote little", large_errors, True),
    (f"{SILENT} silent connections", "keys are answered", silent_connections, True),
    ("paths in other spellings", "none opens", spelled_paths, True),
    ("salts of one key's users", "they share nothing", salted_prefixes, True),
    ("web pages elsewhere", "refused", web_pages, False),
)
