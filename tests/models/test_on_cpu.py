"""What the log says of texts that can depend on what else is served."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.models.on_cpu import report_dependence
from ballast.weights.checkpoint import load_host_model
from benchmarks.families import config, make

KEPT = None


@pytest.mark.parametrize(
    ("family", "settings", "matrix"),
    [
        ("llama", {"model_impl": "fused", "linear": "packed"}, KEPT),
        ("llama", {"model_impl": "generic", "linear": "packed"}, KEPT),
        ("llama", {"model_impl": "generic", "linear": "plain"}, "q_proj"),
        ("qwen3_moe", {"model_impl": "fused", "linear": "packed"}, KEPT),
        ("qwen3_moe", {"model_impl": "generic", "linear": "packed"}, "experts"),
        ("gemma2", {"model_impl": "fused", "linear": "packed"}, KEPT),
        ("gemma2", {"model_impl": "generic", "linear": "packed"}, "lm_head"),
    ],
)
def test_a_matrix_that_is_not_ours_to_multiply_is_named(
    family: str,
    settings: dict[str, str],
    matrix: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(tmp_path, config(family, tie_word_embeddings=family == "gemma2"))
    asked = ModelSettings(name="m", path=str(tmp_path), dtype="bfloat16", **settings)  # type: ignore[arg-type]
    host = load_host_model(asked)
    try:
        with caplog.at_level(logging.INFO, "ballast.models.on_cpu"):
            report_dependence(host, DeviceSettings(budget_bytes=0, invariant=True))
        assert ("is not kept" in caplog.text) == (matrix is not KEPT)
        assert matrix is KEPT or matrix in caplog.text
        caplog.clear()
        with caplog.at_level(logging.INFO, "ballast.models.on_cpu"):
            report_dependence(host, DeviceSettings(budget_bytes=0, invariant=False))
        assert "`invariant: 1` of the device prevents it" in caplog.text
    finally:
        host.close()
