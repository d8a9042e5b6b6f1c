"""llama.cpp's server in router mode as a rival: one process a model, the longest idle one goes.

Its server is built from the sources that llama-cpp-python's sdist on PyPI brings (docs/rivals.md).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rival_processes import free_port, server
from benchmarks.rival_terms import Running, Settings, Terms

MODELS, THREADS, SLOTS = "--models-max", "-t", "-np"
FIXED = ("--cache-ram", "0")
"""No cache of prompts in host memory, which has 8 GiB by default: beyond the budget."""


@dataclass(frozen=True)
class Router:
    """Serves all models by the router; models are loaded when they are asked for."""

    binary: Path
    name: str = "llamacpp"
    all_at_once: bool = False
    """With memory for all models, each with as much KV as `resident` ones have in the budget: what
    more memory would bring it."""

    def version(self) -> str:
        found = subprocess.run(
            [self.binary, "--version"], capture_output=True, text=True, check=True
        )
        return " ".join((found.stdout + found.stderr).split())[:200]

    def settings(self, terms: Terms) -> Sequence[Settings]:
        """Models at a time, threads of each, requests of each at a time, in bfloat16 and float16
        (for which it has faster kernels where a CPU has no bfloat16 instructions)."""
        many, few = terms.resident, terms.resident - 1
        if self.all_at_once:
            every = len(terms.files)
            shapes = ((1, 8), (1, 4), (1, 16), (2, 8), (2, 4))
            return [
                _settings(terms, "BF16", every, 1, 8, terms.context),
                *(_settings(terms, "F16", every, t, np, terms.context) for t, np in shapes),
            ]
        return [
            _settings(terms, "BF16", many, 1, 8),
            _settings(terms, "F16", many, 1, 8),
            _settings(terms, "F16", many, 2, 8),
            _settings(terms, "F16", many, 1, 4),
            _settings(terms, "F16", few, 1, 16),
            _settings(terms, "F16", few, 2, 8),
        ]

    @contextmanager
    def serving(self, terms: Terms, chosen: Settings, log: Path) -> Iterator[Running]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        directory = next(iter(terms.files.values())).parent.parent / chosen.kind
        command = [str(self.binary), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--models-dir", str(directory), *chosen.options]
        with server(command, url, log) as pid:
            yield Running(dict.fromkeys(terms.files, url), (pid,))


def _settings(
    terms: Terms, kind: str, models: int, threads: int, slots: int, context: int | None = None
) -> Settings:
    """`context`: tokens of KV of each model; None: all that `models` at a time can have."""
    if context is None:
        context = terms.context_beside(models)
    return Settings(
        f"{models} models at a time, {threads} threads each, {slots} slots, {kind}",
        models * (terms.weight_bytes + context * terms.kv_bytes),
        (
            *(MODELS, str(models), THREADS, str(threads), SLOTS, str(slots)),
            *("-c", str(context), *FIXED),
        ),
        resident=models,
        kind=kind,
    )
