"""What clients do: bodies, floods, grammars, connections, readers who do not read, large answers.

Each attack is (name, what is expected, what does it).
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.resident import Memory
from benchmarks.robustness_target import (
    ADMIN_KEY,
    ATTACKER_KEY,
    FEW,
    MODEL,
    OTHER_KEY,
    PATIENCE_SECONDS,
    VICTIM,
    VICTIM_KEY,
    Target,
    statuses,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "hello wor "
STALLED, PROBES = 8, 100
BURST = 300
CLIENTS, FLOOD_SECONDS = 130, 15.0
UNREAD_SECONDS, UNREAD_MIB = 15.0, 64
SILENT, ROUNDS = 8300, 20
REQUESTS = 16


def refused(path: str, make: Callable[[], Any]) -> Callable[[Target], str]:
    """Send a body that is too much; it is to be refused with 4xx."""

    def run(target: Target) -> str:
        status, answer = target.post(path, make())
        seen = f"{status}: {_message(answer)}"
        assert 400 <= status < 500, seen
        return seen

    return run


def answered(path: str, make: Callable[[], Any]) -> Callable[[Target], str]:
    """Send a body that is much, and may be answered, or refused with 4xx."""

    def run(target: Target) -> str:
        status, answer = target.post(path, make())
        assert status < 500, f"{status}: {_message(answer)}"
        return str(status)

    return run


def _message(answer: Any) -> str:
    text = answer["error"]["message"] if isinstance(answer, dict) else answer
    return f"{text:.90}"


def _messages(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [*messages], "max_tokens": 1, **fields}


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _prompt(prompt: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1}


def _calls(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tools(n: int, n_properties: int) -> list[Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(n_properties)}
    schema = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(n)
    ]


def _shared_definitions() -> dict[str, Any]:
    large = {"enum": ["x" * 1000] * 200}
    properties = {f"p{i}": {"$ref": "#/$defs/large"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": {"large": large}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return _messages(_said("a"), model=VICTIM, tools=[tool], tool_choice="required")


def crowd_of_bodies(target: Target) -> str:
    """Twenty of the largest bodies at a time."""
    body = b'{"model": "%s", "messages": [' % MODEL.encode() + b"{}," * 10**6 + b"{}]}"
    found: list[tuple[int, Any]] = []
    threads = [
        threading.Thread(target=lambda: found.append(target.post(CHAT, body))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(400 <= status < 500 for status, _ in found), statuses(found)
    return statuses(found)


def burst_of_conversations(target: Target) -> str:
    """Hundreds of conversations of ordinary length, all sent before one is answered."""
    body = json.dumps(_messages(*[_said("x")] * 1900)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connections = [target.connect(head.encode()) for _ in range(BURST)]
    found: list[tuple[int, Any]] = []
    try:
        for each in connections:
            each.sendall(body)
        for each in connections:
            each.settimeout(PATIENCE_SECONDS)
            found.append((int(each.recv(100).split()[1]), None))
    finally:
        for each in connections:
            each.close()
    seen = f"{len(body) >> 10} KiB each: {statuses(found)}"
    assert all(status < 500 for status, _ in found), seen
    return seen


def stalled_bodies(target: Target) -> str:
    """Bodies for `/live` that are announced, begun, and do not end. No key is shown."""
    head = b"POST /live HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n"
    stalled = [target.connect(head) for _ in range(STALLED)]
    for each in stalled:
        with contextlib.suppress(OSError):  # it may have been answered, and be closed
            each.sendall(b"x" * 7_900_000)
    try:
        found = [target.ask("GET", "/live", key="") for _ in range(PROBES)]
        found += [target.ask("GET", "/health", key="") for _ in range(PROBES)]
    finally:
        for each in stalled:
            each.close()
    assert all(status == 200 for status, _ in found), statuses(found)
    return f"GET: {statuses(found)}"


def grammar_for_many_choices(target: Target) -> str:
    """A grammar of 1,900 long words, for 128 choices."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefgh", k=120)) for _ in range(1900)]
    status, answer = target.complete(n=128, structured_outputs={"choice": words})
    seen = str(status) if status == 200 else f"{status}: {_message(answer)}"
    assert status < 500, seen
    return seen


def flood(priority: int | None) -> Callable[[Target], str]:
    """130 clients of one key; another one asks one thing after the other."""

    def run(target: Target) -> str:
        over = threading.Event()
        found: list[tuple[int, Any]] = []

        def client() -> None:
            while not over.is_set():
                answer = target.complete(priority=priority, max_tokens=64, ignore_eos=True)
                found.append(answer)
                if answer[0] != 200:
                    over.wait(0.5)

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        waits: list[float] = []
        others: list[tuple[int, Any]] = []
        end = time.monotonic() + FLOOD_SECONDS
        try:
            while time.monotonic() < end:
                began = time.monotonic()
                others.append(target.complete(OTHER_KEY))
                waits.append(time.monotonic() - began)
                time.sleep(0.2)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        longest = max(waits)
        seen = f"others {statuses(others)} within {longest:.1f} s; the flood {statuses(found)}"
        assert all(status == 200 for status, _ in others), seen
        assert longest < FLOOD_SECONDS / 3, seen
        return seen

    return run


def unread_stream(target: Target) -> str:
    """128 choices with twenty alternatives for each token, of which nothing is read."""
    body = {
        "model": MODEL,
        "prompt": [40, 41],
        "max_tokens": 480,
        "ignore_eos": True,
        "n": 128,
        "logprobs": 20,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with Memory({"server": target.pid}) as memory:
        before = memory.now()["server"]
        with target.connect(head.encode() + content):
            time.sleep(UNREAD_SECONDS)
        grown = memory.peak()["server"] - before
    seen = f"the server grew by {grown:.0f} MiB"
    assert grown < UNREAD_MIB, seen
    return seen


def largest_answer(target: Target) -> str:
    """128 choices with 20 alternatives of each token: as many tokens as fit, then more."""
    body = {"model": MODEL, "messages": [_said("a")], "n": 128, "ignore_eos": True}
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
        {"seed": "x" * LARGE},
        {"logit_bias": {"9" * LARGE: "x"}},
        {"x" * LARGE: 1, "seed": -0.5},
    )
    found = [
        target.post(CHAT, {"model": MODEL, "messages": [_said("a")], **text}) for text in texts
    ]
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


def _drawn(seed: int, n: int) -> list[int]:
    """Tokens of a prompt that no other one begins like."""
    draw = random.Random(seed)
    return [draw.randrange(100, 200) for _ in range(n)]


def more_running(target: Target) -> str:
    """PATCH a model from 2 to 8 running requests while 16 are open."""

    def patch(running: int) -> None:
        body = {"limits": {"running": running}}
        status, answer = target.ask("PATCH", f"/admin/models/{FEW}", body, ADMIN_KEY)
        assert status == 200, f"PATCH {status}: {answer}"

    found: list[tuple[int, Any]] = []

    def ask() -> None:
        found.extend(target.many(REQUESTS, model=FEW, max_tokens=200, ignore_eos=True))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    try:
        patch(8)
    finally:
        asking.join()
        patch(2)
    assert all(status == 200 for status, _ in found), statuses(found)
    return statuses(found)


LARGE = 7 << 20
CLIENT_ATTACKS: tuple[tuple[str, str, Callable[[Target], str]], ...] = (
    (
        "a million empty messages",
        "refused",
        refused(CHAT, lambda: b'{"model": "m", "messages": [' + b"{}," * 10**6 + b"{}]}"),
    ),
    (
        "30 MB of empty messages",
        "refused",
        refused(CHAT, lambda: b'{"model": "m", "messages": [' + b"{}," * 10**7 + b"{}]}"),
    ),
    ("twenty such bodies at a time", "refused", crowd_of_bodies),
    (f"{BURST} conversations at once", "not 5xx", burst_of_conversations),
    ("8 MB of text", "refused", refused(TEXT, lambda: _prompt(WORDS * 800_000))),
    ("7 MB of text in a message", "refused", refused(CHAT, lambda: _messages(_said("a" * LARGE)))),
    (
        "7 MB of text to tokenize",
        "refused",
        refused("/tokenize", lambda: {"model": MODEL, "prompt": WORDS * (LARGE // 10)}),
    ),
    ("4096 messages", "not 5xx", answered(CHAT, lambda: _messages(*[_said("a")] * 4096))),
    ("a million token ids", "refused", refused(TEXT, lambda: _prompt([7] * 10**6))),
    ("260,000 token ids", "refused", refused(TEXT, lambda: _prompt([7] * 260_000))),
    ("a hundred thousand prompts", "refused", refused(TEXT, lambda: _prompt([[7]] * 10**5))),
    ("256 long prompts", "not 5xx", answered(TEXT, lambda: _prompt([WORDS * 400] * 256))),
    ("nested lists", "refused", refused(TEXT, lambda: b'{"prompt": ' + b"[" * 10**6)),
    (
        "JSON within JSON",
        "refused",
        refused(CHAT, lambda: _messages(_calls("[" + "{}," * 2_000_000 + "0]"), model=VICTIM)),
    ),
    (
        "a hundred large tools",
        "not 5xx",
        answered(CHAT, lambda: _messages(_said("a"), model=VICTIM, tools=_tools(100, 200))),
    ),
    ("tools that share definitions", "refused", refused(CHAT, _shared_definitions)),
    (
        "60,000 tokens to detokenize",
        "not 5xx",
        answered("/detokenize", lambda: {"model": MODEL, "tokens": [300] * 60_000}),
    ),
    ("stalled bodies for /live", "GET /live and /health 200", stalled_bodies),
    ("a grammar for 128 choices", "not 5xx", grammar_for_many_choices),
    ("a flood at the highest priority", "others are answered", flood(-(2**31))),
    ("a flood", "others are answered", flood(None)),
    ("a reader who does not read", f"under {UNREAD_MIB} MiB", unread_stream),
    ("the largest answer", "200, more is refused", largest_answer),
    ("scored prompts come back", "200, more is refused", scored_echoes),
    ("errors about 7 MB", "they quote little", large_errors),
    (f"{SILENT} silent connections", "keys are answered", silent_connections),
    ("a model that may run more requests meanwhile", "16 x 200", more_running),
)
