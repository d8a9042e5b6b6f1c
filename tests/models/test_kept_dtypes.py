"""Parameters that `transformers` keeps in float32 stay so in a model that is served in bfloat16."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ballast.core.settings import ModelSettings
from ballast.kernels.plain.attention import PlainAttention
from ballast.memory.tensor import tensor_at
from ballast.weights.checkpoint import load_host_model
from ballast.weights.packing import DTYPES
from benchmarks.families import make
from benchmarks.tiny import tiny
from tests.models.test_families import of, serve, tokens_of

KEPT = {
    "glm4_moe": r"gate.e_score_correction_bias",
    "dots1": r"gate.e_score_correction_bias",
    "exaone_moe": r"gate.e_score_correction_bias",
    "ernie4_5_moe": r"gate.weight",
    "flint": r"sinks",
}


def reference(path: Path, kind: str) -> Any:
    """A checkpoint in float32, of which a bias of 1/300 is not one of bfloat16's numbers."""
    model = make(path, tiny(kind))
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval(), model


@pytest.mark.parametrize("kind", KEPT)
def test_they_arrive_in_the_dtype_that_transformers_gives_them(kind: str, tmp_path: Path) -> None:
    loaded, _ = reference(tmp_path, kind)
    expected = loaded.state_dict()
    kept = {name for name, tensor in expected.items() if tensor.dtype == torch.float32}
    assert any(KEPT[kind] in name for name in kept)
    settings = ModelSettings(name="m", path=str(tmp_path), dtype="bfloat16", linear="plain")
    host = load_host_model(settings)
    found = {}
    for segment, base in zip(host.segments, host.addresses, strict=True):
        for t in segment.tensors:
            tensor = tensor_at(base + t.offset, t.shape, DTYPES[t.dtype]).clone()
            found |= dict.fromkeys(t.names, tensor)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    host.close()


@pytest.mark.parametrize("how", ["plain", "packed", "device"])
@pytest.mark.parametrize("kind", ["ernie4_5_moe", "glm4_moe"])
def test_they_are_computed_with_as_they_are(kind: str, how: str, tmp_path: Path) -> None:
    """As near to float32 as transformers' bfloat16 is, at the median of eight sequences.

    In one of them rounding may well choose another expert, for us or for them: two of six experts
    are often within 1/1000 of each other, and an early token's choice reaches all later ones.
    """
    loaded, exact = reference(tmp_path, kind)
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    if how == "device":
        settings["attention"] = PlainAttention
    else:
        settings["linear"] = how
    ours, theirs = [], []
    for seed in range(4):
        a, b = tokens_of(70, 2 * seed + 1), tokens_of(29, 2 * seed + 2)
        best = torch.stack([of(exact, x) for x in (a, b)])
        ours += (serve(tmp_path, a, b, **settings) - best).abs().mean(-1).tolist()
        theirs += (torch.stack([of(loaded, x) for x in (a, b)]) - best).abs().mean(-1).tolist()
    assert statistics.median(ours) < 1.5 * statistics.median(theirs)
