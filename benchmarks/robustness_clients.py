"""What clients do: bodies, floods, grammars, readers who do not read, curiosity.

Each attack is (name, what is expected, what does it).
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.resident import Memory
from benchmarks.robustness_target import (
    ATTACKER_KEY,
    MODEL,
    OTHER_KEY,
    PART_KEY,
    PATIENCE_SECONDS,
    VICTIM,
    Target,
    statuses,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "hello wor "
STALLED, PROBES = 8, 100
BURST = 300
CLIENTS, FLOOD_SECONDS = 130, 15.0
UNREAD_SECONDS, UNREAD_MIB = 15.0, 64


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


def restricted_key(target: Target) -> str:
    """What a key for one model is shown of others."""
    shown = {
        path: target.ask("GET", path, key=PART_KEY)
        for path in ("/admin/state", "/metrics", "/v1/models", "/health")
    }
    leaks = [path for path, (_, answer) in shown.items() if MODEL in json.dumps(answer)]
    seen = ", ".join(f"{path} {status}" for path, (status, _) in shown.items())
    assert not leaks, f"{seen}; {leaks} name other models"
    return seen


def cached_prefix(target: Target) -> str:
    """Whether one key can learn what another one has asked, by what is cached."""
    prompt = [random.Random(7).randrange(100, 200) for _ in range(200)]

    def cached(key: str) -> int:
        status, answer = target.complete(key, prompt=prompt)
        assert status == 200, f"{status}: {_message(answer)}"
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached(OTHER_KEY)
    own, others = cached(OTHER_KEY), cached(ATTACKER_KEY)
    seen = f"its own key finds {own} tokens, another {others}"
    assert own > 0, seen
    assert others == 0, seen
    return seen


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
    ("a key for one model looks around", "it sees no other", restricted_key),
    ("a key looks for others' prefixes", "it finds none", cached_prefix),
)
