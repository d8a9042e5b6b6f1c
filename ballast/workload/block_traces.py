"""Load traces whose rows name their prompts' blocks by hashes: Mooncake, Qwen-Bailian, agents.

Equal hashes are equal tokens. How many tokens a block has is the format's, and a row whose number
of blocks does not fit its length is refused: read with another block size, a trace would share
other prefixes than were recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ballast.core.units import ceil_div
from ballast.workload.trace_lines import errors_at, read_lines
from ballast.workload.trace_requests import TraceRequests
from ballast.workload.workload import Workload, WorkloadError

BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}
"""Tokens per hashed block, by the traces' own descriptions; the last one of a prompt may be cut."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct):
    timestamp: _Seconds
    """Milliseconds."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]


def load_mooncake(path: Path) -> Workload:
    """Load a trace of Mooncake's. Raises WorkloadError."""
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    found = TraceRequests(path)
    for line, text in read_lines(path):
        with errors_at(path, line):
            row = decode(text)
            found.add(
                row.timestamp / 1000,
                "mooncake",
                row.input_length,
                row.output_length,
                blocks=_fitting("mooncake", row.input_length, row.hash_ids),
                block_tokens=BLOCK_TOKENS["mooncake"],
            )
    return found.workload("Mooncake, FAST'25, Apache-2.0")


class _BailianLine(msgspec.Struct):
    chat_id: int
    timestamp: _Seconds
    """Seconds."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]
    parent_chat_id: int = -1
    """The turn before; negative: none."""


def load_bailian(path: Path) -> Workload:
    """Load a trace of Qwen-Bailian's; a session is a chat with all its turns. Raises
    WorkloadError."""
    decode = msgspec.json.Decoder(_BailianLine).decode
    found, first = TraceRequests(path), dict[int, int]()
    for line, text in read_lines(path):
        with errors_at(path, line):
            row = decode(text)
            parent = row.chat_id if row.parent_chat_id < 0 else row.parent_chat_id
            first[row.chat_id] = root = first.get(parent, parent)
            found.add(
                row.timestamp,
                "bailian",
                row.input_length,
                row.output_length,
                session=f"chat-{root}",
                blocks=_fitting("bailian", row.input_length, row.hash_ids),
                block_tokens=BLOCK_TOKENS["bailian"],
            )
    return found.workload("Qwen-Bailian usage traces, ATC'25, Apache-2.0")


def _fitting(kind: str, tokens: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return `blocks`, or raise ValueError where there are more or fewer than the prompt has."""
    due = ceil_div(tokens, BLOCK_TOKENS[kind])
    if len(blocks) == due:
        return blocks
    fault = (
        f"hash_ids: {len(blocks)} blocks, but {kind}'s {tokens} tokens are {due} blocks of "
        f"{BLOCK_TOKENS[kind]}"
    )
    for other, size in BLOCK_TOKENS.items():
        if len(blocks) == ceil_div(tokens, size):
            fault += f"; it would be right for blocks of {size} ({other})"
    raise ValueError(fault)


class _Turn(msgspec.Struct):
    """A turn of an agent, or a sub-agent with turns of its own, whose times count from its `t`."""

    t: _Seconds
    type: str
    model: str = ""
    prompt: _Count = msgspec.field(default=0, name="in")
    output: _Count = msgspec.field(default=0, name="out")
    hash_ids: tuple[int, ...] = ()
    requests: tuple[_Turn, ...] = ()


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: tuple[_Turn, ...]


def load_agentic(path: Path, session_gap: float) -> Workload:
    """Load sessions of agents, which start `session_gap` seconds apart. Raises WorkloadError."""
    if not 0 <= session_gap < float("inf"):
        raise WorkloadError(f"session_gap: {session_gap!r}: seconds, 0 or more")
    decode = msgspec.json.Decoder(_Session).decode
    found = TraceRequests(path)
    sessions = 0
    for line, text in read_lines(path):
        with errors_at(path, line):
            session = decode(text)
            turns = sorted(_flat(session.requests, 0.0), key=lambda turn: turn[0])
            for at, turn in turns:
                _check_turn(session, at, turn)
                found.add(
                    sessions * session_gap + at,
                    turn.model,
                    turn.prompt,
                    turn.output,
                    session=session.id,
                    blocks=turn.hash_ids,
                    block_tokens=session.block_size,
                )
            sessions += 1
            found.separate_blocks()
    return found.workload(
        "agent sessions of kv-cache-tester, Apache-2.0",
        f"sessions start {session_gap:g} s apart; turns at recorded times, whatever answers take",
    )


def _check_turn(session: _Session, at: float, turn: _Turn) -> None:
    """Raise ValueError for a turn without a model, or whose blocks do not fit its length: all that
    it fills, and perhaps the one that it begins."""
    if not turn.model:
        raise ValueError(f"a turn of {session.id} at {at:g} s names no model")
    size, blocks = session.block_size, len(turn.hash_ids)
    filled, begun = turn.prompt // size, ceil_div(turn.prompt, size)
    if blocks and not filled <= blocks <= begun:
        raise ValueError(
            f"a turn of {session.id} at {at:g} s has {blocks} hash_ids, but its {turn.prompt} "
            f"tokens fill {filled} blocks of {size} (block_size)"
        )


def _flat(turns: Iterable[_Turn], start: float) -> Iterable[tuple[float, _Turn]]:
    for turn in turns:
        if turn.type == "subagent":
            yield from _flat(turn.requests, start + turn.t)
        else:
            yield start + turn.t, turn
