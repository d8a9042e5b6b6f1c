"""Ask all models of a server the same questions at once, and tabulate who waited how long.

The part of `ballast demo` that shows what a user feels under each preset.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import httpx
from rich.table import Table

from ballast.bench.tables import seconds

QUESTIONS = ("What is a ship's ballast?", "What does a lighthouse do?")
"""Asked one after the other, each of all models at once."""
MOST_TOKENS = 48
PATIENCE = 60.0
"""Seconds after which an answer is given up."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What one model answered."""

    model: str
    question: str
    text: str
    first: float | None
    """Seconds until its first words; None: it was refused."""


def ask(url: str, models: Sequence[str]) -> list[ModelAnswer]:
    """Ask `QUESTIONS`, greedily; returns the answers in order, of each question by model."""

    async def run() -> list[ModelAnswer]:
        found: list[ModelAnswer] = []
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            for question in QUESTIONS:
                found += await asyncio.gather(*(_ask(client, m, question) for m in models))
        return found

    return asyncio.run(run())


async def _ask(client: httpx.AsyncClient, model: str, question: str) -> ModelAnswer:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MOST_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    began, first, text = time.monotonic(), None, ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                words = choices[0].get("delta", {}).get("content")
                if words and first is None:
                    first = time.monotonic() - began
                text += words or ""
    except httpx.HTTPError:
        return ModelAnswer(model, question, text, None)
    return ModelAnswer(model, question, text, first)


def waits_table(answers: Mapping[str, Sequence[ModelAnswer]]) -> Table:
    """A row per model and a column per preset: the mean wait for the first words."""
    table = Table(title=f"the same {len(QUESTIONS)} questions to all: wait for the first words")
    table.add_column("model")
    for preset in answers:
        table.add_column(preset, justify="right")
    models = dict.fromkeys(a.model for given in answers.values() for a in given)
    for model in models:
        table.add_row(model, *(_wait(model, given) for given in answers.values()))
    longest = [max((a.first or 0.0 for a in given), default=0.0) for given in answers.values()]
    table.add_section()
    table.add_row("longest", *map(seconds, longest))
    return table


def _wait(model: str, given: Sequence[ModelAnswer]) -> str:
    waits = [a.first for a in given if a.model == model]
    known = [w for w in waits if w is not None]
    if not known:
        return "refused"
    return seconds(mean(known)) + (", refused once" if len(known) < len(waits) else "")


def said(answers: Sequence[ModelAnswer]) -> list[str]:
    """Return the first question and what each model answered, as lines."""
    lines = [QUESTIONS[0]]
    lines += [
        f"  {a.model}: {' '.join(a.text.split())}"
        for a in answers
        if a.question == QUESTIONS[0] and a.first is not None
    ]
    return lines
