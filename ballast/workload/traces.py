"""Load public traces of language-model serving (and one of an image service) as workloads.

Each format is recognised by its columns, whatever the file is called, gzip or plain. Nothing is
guessed silently: a value that a trace lacks and a loader fills in is named in the workload's
labels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from ballast.workload.block_traces import load_agentic, load_bailian, load_mooncake
from ballast.workload.lengths import CHAT_OUTPUT
from ballast.workload.servegen import ServeGenSample, sample_servegen
from ballast.workload.trace_lines import (
    columns_of,
    errors_at,
    moment,
    number,
    read_lines,
    read_rows,
    whole,
)
from ballast.workload.trace_requests import TraceRequests
from ballast.workload.workload import Workload, WorkloadError

COLUMNS = {
    "arena": ("adapter_dir", "prompt_len", "output_len", "req_time"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Model", "Request tokens", "Response tokens"),
    "gentd": ("gmt_create", "prompt_length", "checkpoint_model_version_id"),
    "servegen": ("client_id", "timestamp", "rate", "cv"),
}
"""Columns by which a CSV trace is recognised; others may stand beside them."""
KEYS = {
    "bailian": ("chat_id", "timestamp", "input_length", "output_length", "hash_ids"),
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "agentic": ("id", "block_size", "requests"),
}
"""Keys by which a trace of JSON lines is recognised, the first that fits."""
KINDS = (*COLUMNS, *KEYS)
CHARACTERS_PER_TOKEN = 4
"""Turns the prompt lengths of `gentd`, in characters, into tokens."""
SESSION_GAP = 60.0


def load_trace(
    path: str | Path,
    kind: str | None = None,
    *,
    session_gap: float = SESSION_GAP,
    servegen: ServeGenSample | None = None,
) -> Workload:
    """A public trace as a workload, times from its first request.

    `kind` is one of KINDS; None: seen from the first line. `session_gap` is the time in seconds
    between the starts of two sessions of `agentic`, whose times count from the session's own
    start. `servegen` says what to draw from the client rates of `servegen`. Raises WorkloadError.
    """
    file = Path(path)
    if kind is None:
        kind = detect(file)
    elif kind in COLUMNS:
        _check_columns(file, kind)
    if kind == "servegen":
        return sample_servegen(file, servegen or ServeGenSample())
    if kind == "agentic":
        return load_agentic(file, session_gap)
    loaders = {
        "arena": _arena,
        "azure": _azure,
        "bailian": load_bailian,
        "burstgpt": _burstgpt,
        "gentd": _gentd,
        "mooncake": load_mooncake,
    }
    if kind not in loaders:
        raise WorkloadError(f"kind: {kind!r}: one of {', '.join(KINDS)}")
    return loaders[kind](file)


def detect(path: Path) -> str:
    """The kind of a trace, from the columns or keys of its first line."""
    line, first = next(read_lines(path), (1, ""))
    by_key = first.lstrip().startswith("{")
    if by_key:
        with errors_at(path, line):
            found = set(msgspec.json.decode(first, type=dict[str, msgspec.Raw]))
    else:
        found = set(columns_of(first))
    if "window_start" in found:
        raise WorkloadError("only token lengths: load the client rates beside it", str(path), line)
    known = KEYS if by_key else COLUMNS
    for kind, needed in known.items():
        if found.issuperset(needed):
            return kind
    what = "keys" if by_key else "columns"
    listed = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in known.items())
    fault = f"not a known trace format by its {what} ({', '.join(sorted(found))}); known {what}"
    raise WorkloadError(f"{fault}: {listed}", str(path), line)


def _check_columns(path: Path, kind: str) -> None:
    """Raise WorkloadError for a file that lacks columns of a kind that was named."""
    line, first = next(read_lines(path), (1, ""))
    missing = [name for name in COLUMNS[kind] if name not in columns_of(first)]
    if missing:
        fault = f"column {missing[0]!r} is missing; {kind} has {', '.join(COLUMNS[kind])}"
        raise WorkloadError(fault, str(path), line)


def _arena(path: Path) -> Workload:
    found = TraceRequests(path)
    for line, row in read_rows(path):
        with errors_at(path, line):
            lengths = whole(row, "prompt_len"), whole(row, "output_len")
            found.add(number(row, "req_time"), row["adapter_dir"], *lengths)
    return found.workload("LMSYS Chatbot Arena by way of VTC and Prism's artifact")


def _azure(path: Path) -> Workload:
    service = next((s for s in ("conv", "code") if s in path.name), None)
    model = f"azure-{service}" if service else "azure"
    found = TraceRequests(path)
    for line, row in read_rows(path):
        with errors_at(path, line):
            lengths = whole(row, "ContextTokens"), whole(row, "GeneratedTokens")
            found.add(moment(row, "TIMESTAMP"), model, *lengths)
    return found.workload("Azure public dataset 2023, CC-BY 4.0 (Splitwise, ISCA'24)")


def _burstgpt(path: Path) -> Workload:
    """Failed requests, which have no response tokens, are asked again, for one token."""
    found = TraceRequests(path)
    for line, row in read_rows(path):
        with errors_at(path, line):
            if not row["Model"]:
                raise ValueError("Model: empty: a model's name")
            lengths = whole(row, "Request tokens"), whole(row, "Response tokens")
            session = row.get("Session ID") or None
            found.add(number(row, "Timestamp"), row["Model"], *lengths, session=session)
    return found.workload("BurstGPT, CC-BY 4.0")


def _gentd(path: Path) -> Workload:
    """Real arrivals over many models, of an image service: token counts are made up."""
    found = TraceRequests(path)
    nameless = 0
    for line, row in read_rows(path):
        with errors_at(path, line):
            at = moment(row, "gmt_create")
            if not row["checkpoint_model_version_id"]:
                nameless += 1
                continue
            characters = number(row, "prompt_length") if row["prompt_length"] else 0.0
            prompt = max(1, round(characters / CHARACTERS_PER_TOKEN))
            model = row["checkpoint_model_version_id"]
            found.add(at, model, prompt, 1, session=row["groupId"])
    drawn = CHAT_OUTPUT.sample(np.random.default_rng(0), len(found.requests)).tolist()
    found.requests = [
        replace(r, output_tokens=n) for r, n in zip(found.requests, drawn, strict=True)
    ]
    return found.workload(
        "Alibaba cluster-trace-v2026-GenAI, for research use",
        f"synthetic mix: arrivals of an image service; prompt tokens are characters / "
        f"{CHARACTERS_PER_TOKEN}, output tokens {CHAT_OUTPUT}, seed 0",
        *([f"{nameless} requests without a model left out"] if nameless else []),
    )
