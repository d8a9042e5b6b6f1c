"""Which checkpoints are of embedding models that can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ballast.core.errors import CheckpointError
from ballast.weights.pooling import pooling_of

KINDS = ("Transformer", "Pooling", "Normalize")


def write(directory: Path, kinds: tuple[str, ...], pooling: dict[str, Any]) -> None:
    """As sentence-transformers saves a model of these modules."""
    steps = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if kind == "Transformer" else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(steps))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def modes(*on: str) -> dict[str, Any]:
    known = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    return {
        "word_embedding_dimension": 64,
        **{f"pooling_mode_{mode}": mode in on for mode in known},
        "include_prompt": True,
    }


@pytest.mark.parametrize(
    ("kinds", "pooling", "found"),
    [
        (KINDS, modes("lasttoken"), "last"),
        (KINDS[:2], modes("lasttoken"), "last"),
        (KINDS, {"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "last"),
        (KINDS, modes("mean_tokens"), "mean"),
        (KINDS[:2], modes("cls_token"), "cls"),
        (KINDS, modes("max_tokens"), ""),
        (KINDS, modes("lasttoken", "mean_tokens"), ""),
        (KINDS, {"pooling_mode": "mean"}, "mean"),
        ((*KINDS[:2], "Dense"), modes("lasttoken"), ""),
    ],
)
def test_how_a_text_is_pooled(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], found: str
) -> None:
    assert pooling_of(tmp_path) is None
    write(tmp_path, kinds, pooling)
    assert pooling_of(tmp_path) == found


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"type": 3}'])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        pooling_of(tmp_path)
