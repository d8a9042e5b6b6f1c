"""Models that also take images, used for text: only what text goes through is there, and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.weights.inspection import inspect_model
from benchmarks.architectures import auto_of
from benchmarks.families import make
from benchmarks.tiny import tiny
from tests.models.test_families import of, serve, tokens_of
from tests.models.tiny import Served

GEMMA = {
    "text_config": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA,
    "mistral3": {},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "llava": {"text_config": {"model_type": "llama"}},
}
FUSED = {"mistral3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_text_is_exact(kind: str, tmp_path: Path) -> None:
    """On the fast path as well, where the part for text is of a family that has it."""
    config = tiny(kind, **WRAPPERS[kind])
    reference = make(tmp_path, config, auto=auto_of(config))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    assert theirs.std() > 0.5
    for impl in ("generic", "auto"):
        served = Served(tmp_path, model_impl=impl)
        assert served.host.fused == (impl == "auto" and kind in FUSED)
        names = [n for s in served.host.segments for t in s.tensors for n in t.sources]
        assert not any("vision" in n or "visual" in n or "projector" in n for n in names)
        served.close()
        ours = serve(tmp_path, a, b, model_impl=impl)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_wrapper_is_as_large_as_its_part_for_text() -> None:
    text = inspect_model(tiny("gemma3_text"))
    whole = inspect_model(tiny("gemma3"))
    assert [name for name, _ in whole.segments] == [name for name, _ in text.segments]
    for (_, ours), (_, theirs) in zip(whole.segments, text.segments, strict=True):
        assert [w.shape for w in ours] == [w.shape for w in theirs]
