"""`scripts/gpu_check` where there is no GPU, and its parts as far as a stand-in lets them run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from ballast.core.units import MiB
from ballast.kernels.plain_attention import PlainAttention
from ballast.models.graphs import GraphCache
from benchmarks import gpu_check
from benchmarks.gpu_check import Gpu, Part, check
from benchmarks.gpu_model import Random
from tests.memory.fake_cuda import FakeDriver
from tests.models.fake_graphs import Recorders, StaticAttention

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--json", str(tmp_path / "found.json")]) == 2
    told = capsys.readouterr().err
    assert "no GPU" in told
    assert all(part.name in told for part in gpu_check.PARTS)
    assert not (tmp_path / "found.json").exists()
    assert sum(part.seconds for part in gpu_check.PARTS) <= gpu_check.SECONDS


def test_the_script_needs_no_server() -> None:
    """What images with a GPU often lack is not asked for."""
    code = (
        "import sys\n"
        "for name in ('fastapi', 'zmq', 'ortools', 'uvicorn', 'msgspec', 'pydantic'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.gpu_check, benchmarks.gpu_model, benchmarks.elastic_overhead\n"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_a_part_that_breaks_off_or_has_no_time_left_does_not_stop_the_rest() -> None:
    def broken(gpu: Gpu) -> dict[str, Any]:
        raise RuntimeError("it is hot")

    parts = [
        Part("broken", 1, broken),
        Part("long", 100, broken),
        Part("good", 1, lambda gpu: {"passed": True}),
    ]
    found = check(cast(Gpu, None), parts, seconds=50)
    assert found["broken"]["broke_off"] == "RuntimeError: it is hot"
    assert "100 seconds" in found["long"]["not_run"]
    assert found["good"]["passed"]
    json.dumps(found)


def test_pages_are_timed_and_given_back() -> None:
    driver = FakeDriver(n_bytes=256 * MiB, granularity=2 * MiB)
    found = gpu_check.pool(cast(Gpu, SimpleNamespace(driver=driver)))
    assert found["microseconds"]["both"] > 0
    assert driver.is_clean()


def small() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def test_a_step_is_timed_with_a_graph_and_without() -> None:
    driver, cpu = FakeDriver(n_bytes=64 * MiB), torch.device("cpu")
    cache = GraphCache(64 * MiB, Recorders())
    shape = (driver, cpu, small(), 64 << 10)
    made = Random(*shape, sequences=3, context=40, make=StaticAttention, graphs=cache)
    with made as model:
        work = model.decodes(3, 33)
        told = gpu_check.with_and_without(
            lambda: gpu_check._tokens(model.served.run(work)), cache, 1, lambda: (0, 0), 2
        )
        assert told["same_tokens"]
        assert cache.report().replays == 4
        cache.cap_bytes = 0
        with pytest.raises(RuntimeError, match="nothing could be recorded"):
            gpu_check.with_and_without(
                lambda: gpu_check._tokens(model.served.run(work[:1])), cache, 1, lambda: (0, 0), 2
            )
        cache.close()
    assert driver.is_clean()


def test_weights_made_in_place_decode() -> None:
    driver = FakeDriver(n_bytes=64 * MiB)
    config = small()
    cpu = torch.device("cpu")
    page = 64 << 10
    made = Random(driver, cpu, config, page, sequences=3, context=40, make=PlainAttention)
    with made as model:
        results = model.served.run(model.decodes(3, 33))
        assert len(results) == 3
        parameters = sum(p.numel() for p in gpu_check._on_meta(config).parameters())
        assert model.weight_bytes == pytest.approx(2 * (parameters - 128 * 64), abs=64 * 4)
        theirs = model.reference(config, 3, 33)
        theirs()
        theirs()
    assert driver.is_clean()
