"""Load public traces of language-model serving (and one of an image service) as workloads.

Each format is recognised by its first line, whatever the file is called, gzip or plain. Nothing is
guessed silently: a value that a trace lacks and a loader fills in is named in the workload's
labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ballast.workload.lengths import CHAT_OUTPUT
from ballast.workload.servegen import ServeGenSample, sample_servegen
from ballast.workload.trace_lines import naming, number, read_lines, read_rows, tokens
from ballast.workload.workload import Workload, WorkloadError, WorkloadRequest

KINDS = ("arena", "azure", "mooncake", "gentd", "servegen", "agentic")
CHARACTERS_PER_TOKEN = 4
"""Turns the prompt lengths of `gentd`, in characters, into tokens."""
MOONCAKE_BLOCK = 512
"""Tokens per hashed block, by the trace's own description."""


def load_trace(
    path: str | Path,
    kind: str | None = None,
    *,
    session_gap: float = 60.0,
    servegen: ServeGenSample | None = None,
) -> Workload:
    """A public trace as a workload, times from its first request.

    `kind` is one of KINDS; None: seen from the first line. `session_gap` is the time in seconds
    between the starts of two sessions of `agentic`, whose times count from the session's own
    start. `servegen` says what to draw from the client rates of `servegen`. Raises WorkloadError.
    """
    file = Path(path)
    kind = detect(file) if kind is None else kind
    if kind == "arena":
        return _arena(file)
    if kind == "azure":
        return _azure(file)
    if kind == "mooncake":
        return _mooncake(file)
    if kind == "gentd":
        return _gentd(file)
    if kind == "servegen":
        return sample_servegen(file, servegen or ServeGenSample())
    if kind == "agentic":
        return _agentic(file, session_gap)
    raise WorkloadError(f"kind: {kind!r}: one of {', '.join(KINDS)}")


def detect(path: Path) -> str:
    """The kind of a trace, from its first line."""
    first = next((text for _, text in read_lines(path)), "").strip()
    columns = set(first.split(","))
    for kind, needed in (
        ("arena", {"adapter_dir", "prompt_len", "output_len", "req_time"}),
        ("azure", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
        ("gentd", {"gmt_create", "prompt_length", "checkpoint_model_version_id"}),
        ("servegen", {"client_id", "timestamp", "rate", "cv"}),
    ):
        if needed <= columns:
            return kind
    if first.startswith("{"):
        if '"timestamp"' in first and '"input_length"' in first:
            return "mooncake"
        if '"requests"' in first:
            return "agentic"
        if '"window_start"' in first:
            raise WorkloadError("only token lengths: load the client rates beside it", str(path), 1)
    raise WorkloadError(f"not a known trace format ({', '.join(KINDS)})", str(path), 1)


def _arena(path: Path) -> Workload:
    requests: list[WorkloadRequest] = []
    for line, row in read_rows(path):
        with naming(path, line):
            requests.append(
                WorkloadRequest(
                    id=len(requests),
                    at=number(row, "req_time"),
                    model=row["adapter_dir"],
                    prompt_tokens=tokens(row, "prompt_len"),
                    output_tokens=tokens(row, "output_len"),
                )
            )
    return _workload(path, requests, "LMSYS Chatbot Arena by way of VTC and Prism's artifact")


def _azure(path: Path) -> Workload:
    service = next((s for s in ("conv", "code") if s in path.name), None)
    model = f"azure-{service}" if service else "azure"
    requests: list[WorkloadRequest] = []
    for line, row in read_rows(path):
        with naming(path, line):
            requests.append(
                WorkloadRequest(
                    id=len(requests),
                    at=_moment(row, "TIMESTAMP"),
                    model=model,
                    prompt_tokens=tokens(row, "ContextTokens"),
                    output_tokens=tokens(row, "GeneratedTokens"),
                )
            )
    return _workload(path, requests, "Azure public dataset 2023, CC-BY 4.0 (Splitwise, ISCA'24)")


def _gentd(path: Path) -> Workload:
    """Real arrivals over many models, of an image service: token counts are made up."""
    requests: list[WorkloadRequest] = []
    nameless = 0
    for line, row in read_rows(path):
        with naming(path, line):
            at = _moment(row, "gmt_create")
            if not row["checkpoint_model_version_id"]:
                nameless += 1
                continue
            characters = number(row, "prompt_length") if row["prompt_length"] else 0.0
            requests.append(
                WorkloadRequest(
                    id=len(requests),
                    at=at,
                    model=row["checkpoint_model_version_id"],
                    prompt_tokens=max(1, round(characters / CHARACTERS_PER_TOKEN)),
                    output_tokens=1,
                    session=row["groupId"],
                )
            )
    drawn = CHAT_OUTPUT.sample(np.random.default_rng(0), len(requests)).tolist()
    requests = [replace(r, output_tokens=n) for r, n in zip(requests, drawn, strict=True)]
    return _workload(
        path,
        requests,
        "Alibaba cluster-trace-v2026-GenAI, for research use",
        f"synthetic mix: arrivals of an image service; prompt tokens are characters / "
        f"{CHARACTERS_PER_TOKEN}, output tokens {CHAT_OUTPUT}, seed 0",
        *([f"{nameless} requests without a model left out"] if nameless else []),
    )


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct):
    timestamp: _Seconds
    """Milliseconds."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...]


def _mooncake(path: Path) -> Workload:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    requests: list[WorkloadRequest] = []
    for line, text in read_lines(path):
        with naming(path, line):
            row = decode(text)
            requests.append(
                WorkloadRequest(
                    id=len(requests),
                    at=row.timestamp / 1000,
                    model="mooncake",
                    prompt_tokens=max(1, row.input_length),
                    output_tokens=max(1, row.output_length),
                    prefix_blocks=row.hash_ids,
                    block_tokens=MOONCAKE_BLOCK,
                )
            )
    return _workload(path, requests, "Mooncake, FAST'25, Apache-2.0")


class _Turn(msgspec.Struct):
    """A turn of an agent, or a sub-agent with turns of its own, whose times count from its `t`."""

    t: _Seconds
    type: str
    model: str = ""
    prompt: _Count = msgspec.field(default=0, name="in")
    output: _Count = msgspec.field(default=0, name="out")
    hash_ids: tuple[_Count, ...] = ()
    requests: tuple[_Turn, ...] = ()


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: tuple[_Turn, ...]


def _agentic(path: Path, session_gap: float) -> Workload:
    if not 0 <= session_gap < float("inf"):
        raise WorkloadError(f"session_gap: {session_gap!r}: seconds, 0 or more")
    decode = msgspec.json.Decoder(_Session).decode
    requests: list[WorkloadRequest] = []
    sessions = next_block = 0
    for line, text in read_lines(path):
        with naming(path, line):
            session = decode(text)
            turns = sorted(_flat(session.requests, 0.0), key=lambda turn: turn[0])
            # Block ids are the session's own. One int object serves all turns that name a block.
            most = max((max(t.hash_ids, default=-1) for _, t in turns), default=-1)
            ids = range(next_block, next_block + most + 1)
            shared = list(ids)
            next_block = ids.stop
            for at, turn in turns:
                if not turn.model:
                    raise ValueError(f"a turn of {session.id} at {at:g} s names no model")
                requests.append(
                    WorkloadRequest(
                        id=len(requests),
                        at=sessions * session_gap + at,
                        model=turn.model,
                        prompt_tokens=max(1, turn.prompt),
                        output_tokens=max(1, turn.output),
                        session=session.id,
                        prefix_blocks=tuple(map(shared.__getitem__, turn.hash_ids)),
                        block_tokens=session.block_size,
                    )
                )
            sessions += 1
    return _workload(
        path,
        requests,
        "agent sessions of kv-cache-tester, Apache-2.0",
        f"sessions start {session_gap:g} s apart; turns at recorded times, whatever answers take",
    )


def _flat(turns: Iterable[_Turn], start: float) -> Iterable[tuple[float, _Turn]]:
    for turn in turns:
        if turn.type == "subagent":
            yield from _flat(turn.requests, start + turn.t)
        else:
            yield start + turn.t, turn


def _moment(row: dict[str, str], column: str) -> float:
    """Seconds since 1970 of a time stamp without zone; which zone it is does not matter."""
    text = row[column]
    try:
        return datetime.fromisoformat(f"{text}+00:00").timestamp()
    except ValueError:
        raise ValueError(f"{column}: {text!r} is not a time") from None


def _workload(path: Path, requests: list[WorkloadRequest], source: str, *labels: str) -> Workload:
    """Times moved so that the first request is at 0."""
    if not requests:
        raise WorkloadError("holds no requests", str(path))
    start = min(r.at for r in requests)
    moved = (replace(r, at=r.at - start) for r in requests) if start else requests
    return Workload.of(path.name.split(".")[0], moved, source, labels)
