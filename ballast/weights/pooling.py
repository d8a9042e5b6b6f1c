"""Detect embedding models by the files of sentence-transformers in their checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast.core.errors import CheckpointError

MODULES = "modules.json"
_STEPS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_MODES = {
    "lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}


def pooling_of(directory: Path) -> str | None:
    """Return how a text's embedding is made of its tokens' hidden states: `last`, `cls`, `mean`, or
    empty for another way; None: the checkpoint does not say.

    Raises CheckpointError for files that cannot be read.
    """
    path = directory / MODULES
    if not path.is_file():
        return None
    steps = _read(path)
    try:
        kinds = [str(step["type"]).rpartition(".")[2] for step in steps]
        if kinds not in _STEPS:
            return ""
        pooling = _read(directory / str(steps[1]["path"]) / "config.json")
        if "pooling_mode" in pooling:
            return _MODES.get(str(pooling["pooling_mode"]), "")
        chosen = [k for k, on in pooling.items() if k.startswith("pooling_mode_") and on]
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(str(path), None, "not what sentence-transformers writes") from error
    return _MODES.get(chosen[0], "") if len(chosen) == 1 else ""


def is_base_model(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether a decoder was saved without its head (`Qwen3Model`), and nothing says how to pool:
    then its last token, which alone has seen the whole text, is the text's embedding."""
    classes = config.get("architectures")
    named = isinstance(classes, list) and all(str(c).endswith("Model") for c in classes)
    return named and bool(classes) and not (directory / MODULES).exists()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), None, f"not valid JSON: {error}") from error
