"""What a conversation's second turn waits for, when its KV was taken from the device meanwhile.

A random Llama of 110M parameters in bfloat16, over HTTP (`ballast serve`). Each round is a
conversation of its own: a first turn of so many tokens, then one of three mishaps, then the second
turn, which goes on with 200 more tokens. Before the second turn a short request to the same model
brings the weights back and compiles what a new process has to, so that only KV is compared. Three
servers in turns: two keep KV on the host and on disk, over an unpaced and over a paced link; one
has neither and computes the history again. Two rounds of 2,000 tokens, one of 8,000 tokens, which
is evicted twice: eight minutes. (`--quick`: 2,000 tokens, unpaced, one round: two minutes.)

`kept_ttft_ratio`: median time to the first token of the second turn, over the same without tiers,
when the model was `evicted`, its worker `killed` (SIGKILL), the server `restarted`. `paced`: over
a link as fast, in relation to this machine's prefill, as PCIe 5 is to an H100's of an 8B model
(fetching a token's KV takes 1/17 of computing it). `cached`: the smallest share of the first turn
that the second found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.table import Table
from transformers import LlamaConfig

from ballast.bench.server_process import Serving, serving
from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer
from benchmarks.common import finish, options
from benchmarks.single_model import save_random

MISHAPS = ("evicted", "killed", "restarted")
GOALS = {
    "2000": {"evicted": 0.15, "killed": 0.2, "restarted": 0.3},
    "8000": {"evicted": 0.1},
}
NEW, MORE = 8, 200
"""Output tokens of each turn, and tokens that the second adds."""
ADMIN = "keeps-what-it-had"
TOKENS = range(10, 3000)
PCIE5 = 17.0
"""Prefill seconds of a token over those of fetching its KV: Llama-3.1-8B on an H100 (40 us a token,
128 KiB at 55 GB/s)."""
TIMEOUT = 600.0


@dataclass(slots=True)
class Arm:
    """One kind of server, and its seconds to the second turn's first token."""

    file: Path
    tiers: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cached: list[float] = field(default_factory=list)

    @property
    def medians(self) -> dict[str, float]:
        return {m: statistics.median(seconds) for m, seconds in self.seconds.items()}


def make_model(directory: Path, context: int) -> int:
    """Write a checkpoint; returns the bytes of KV of a token."""
    tokenizer = train_tokenizer(documents(), 4000, 1024)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    from transformers import LlamaForCausalLM

    save_random(LlamaForCausalLM, config, directory / "m")
    tokenizer.save_pretrained(directory / "m")
    return 2 * 2 * 12 * 768


def fleet(directory: Path, name: str, tiers: bool, bandwidth: float | None) -> Path:
    file = directory / f"{name}.yaml"
    kept = f"kv_host: 2GiB\nkv_disk: {{path: {name}-kv, bytes: 4GiB}}\n" if tiers else ""
    link = "" if bandwidth is None else f"links: [{{bandwidth: {int(bandwidth)}}}]\n"
    file.write_text(
        f"preset: balloon\n{kept}{link}devices: [{{budget: 2GiB}}]\n"
        f"models: [{{name: m, path: m}}]\nserver: {{admin_key: {ADMIN}}}\n"
    )
    return file


@contextmanager
def client_of(running: Serving) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=running.url, timeout=TIMEOUT, headers=headers) as client:
        yield client


def ask(client: httpx.Client, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and tokens found in a cache."""
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, cached = time.perf_counter(), 0.0, 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                if usage := json.loads(line[6:]).get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first, cached


def replaced(client: httpx.Client) -> None:
    """Wait until another worker serves in place of the first."""
    deadline = time.perf_counter() + TIMEOUT
    while time.perf_counter() < deadline:
        device = client.get("/admin/state").json()["devices"][0]
        if device["restarts"] and device["status"] == "ok":
            return
        time.sleep(0.1)
    raise TimeoutError("the server does not answer")


def settle(client: httpx.Client, tiers: bool) -> None:
    """Wait until the turn's KV has been stored, in all tiers."""
    before: object = None
    while tiers:
        time.sleep(1.0)
        now = client.get("/admin/kv").json()
        if now == before:
            return
        before = now


class Rounds:
    """Rounds of one arm: evictions, and, if `mishaps`, a worker's death and a restart in each. The
    restarted server goes on with the next round's turns."""

    def __init__(self, arm: Arm, length: int, evictions: int, mishaps: bool) -> None:
        self._arm, self._length, self._evictions, self._mishaps = arm, length, evictions, mishaps
        self._rng = random.Random(length)  # the same turns in each arm
        self._unfinished: list[int] | None = None
        """The conversation whose server ends between its turns."""

    def run(self, more: bool) -> None:
        """Finish the round before, if there was one, and, if `more`, begin the next."""
        if not more and self._unfinished is None:
            return
        with (
            serving(self._arm.file, "--log-level", "warning", "--no-changes") as running,
            client_of(running) as client,
        ):
            if self._unfinished is not None:
                self._second(client, "restarted", self._unfinished)
                self._unfinished = None
            if not more:
                return
            history = self._first(client)
            for _ in range(self._evictions):
                client.post("/admin/models/m/evict").raise_for_status()
                history = self._second(client, "evicted", history)
                settle(client, self._arm.tiers)
            if self._mishaps:
                history = self._first(client)
                os.kill(running.worker, signal.SIGKILL)
                replaced(client)
                self._second(client, "killed", history)
                self._unfinished = self._first(client)

    def _first(self, client: httpx.Client) -> list[int]:
        """Answer a conversation's first turn; returns its prompt."""
        history = self._rng.choices(TOKENS, k=self._length)
        ask(client, self._rng.choices(TOKENS, k=20))
        ask(client, history)
        settle(client, self._arm.tiers)
        return history

    def _second(self, client: httpx.Client, mishap: str, history: list[int]) -> list[int]:
        """Answer the turn after a mishap; returns its prompt."""
        ask(client, self._rng.choices(TOKENS, k=MORE))
        prompt = [*history, *self._rng.choices(TOKENS, k=MORE)]
        seconds, cached = ask(client, prompt)
        self._arm.seconds.setdefault(mishap, []).append(seconds)
        self._arm.cached.append(cached / len(history))
        return prompt


def measure(
    directory: Path, kv_bytes: int, length: int, rounds: int, paces: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Results by pace, over an arm that computes the history again."""
    long = length > 2000
    arms = {"computed": Arm(fleet(directory, f"{length}-computed", False, None), False)}

    def of(arm: Arm) -> Rounds:
        return Rounds(arm, length, 2 if long else 1, not long)

    going = {"computed": of(arms["computed"])}
    going["computed"].run(True)
    per_token = arms["computed"].seconds["evicted"][0] / (length + MORE)
    rates = {"unpaced": None, "paced": PCIE5 * kv_bytes / per_token}
    for pace in paces:
        file = fleet(directory, f"{length}-{pace}", True, rates[pace])
        arms[pace] = Arm(file, True)
        going[pace] = of(arms[pace])
    for i in range(rounds):
        for pace in paces:
            going[pace].run(True)
        going["computed"].run(i + 1 < rounds)
    for pace in paces:
        going[pace].run(False)
    expected = arms["computed"].medians
    return {
        pace: {
            "kept_ttft_ratio": {m: s / expected[m] for m, s in arms[pace].medians.items()},
            "kept_ms": {m: 1e3 * s for m, s in arms[pace].medians.items()},
            "computed_ms": {m: 1e3 * s for m, s in expected.items()},
            "cached": min(arms[pace].cached),
            "link_bytes_per_second": rates[pace],
        }
        for pace in paces
    }


def show(result: dict[str, dict[str, Any]]) -> Table:
    table = Table("conversation", *(f"{m}: kept / computed, ms (goal)" for m in MISHAPS), "cached")
    for name, of in result.items():
        goals = GOALS[name.partition(" ")[0]]
        cells = (
            f"{ratio:.2f} ({of['kept_ms'][m]:.0f} / {of['computed_ms'][m]:.0f}; {goals[m]})"
            if (ratio := of["kept_ttft_ratio"].get(m)) is not None
            else ""
            for m in MISHAPS
        )
        table.add_row(name, *cells, f"{of['cached']:.2f}")
    return table


def main() -> None:
    args = options(__doc__)
    lengths = {2000: 1} if args.quick else {2000: 2, 8000: 1}
    result: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        kv_bytes = make_model(directory, max(lengths) + 1024)
        for length, rounds in lengths.items():
            paces = ("unpaced",) if args.quick else ("unpaced", "paced")
            for pace, of in measure(directory, kv_bytes, length, rounds, paces).items():
                result[f"{length} tokens, {pace}"] = of
    finish(args, "kept", result)


if __name__ == "__main__":
    main()
