"""Configurations with values that make no sense: refused with a reason, or served as they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ballast.core.errors import BallastError, BrokenPromise, DeviceError
from ballast.core.job import SequenceWork
from ballast.core.settings import ModelSettings
from ballast.core.units import GiB
from ballast.isolation.limits import Limits
from ballast.isolation.zygote import Zygote
from ballast.weights.manifest import Manifest, ManifestRequest, fork_zygote, read_manifest
from benchmarks.families import config, make
from tests.models.tiny import GREEDY, Served

FAMILIES = ("llama", "qwen3_moe", "gemma2", "gpt2")
TOKENS = [5, 17, 300, 42, 7]
LIMITS = Limits(memory_bytes=1 * GiB, cpu_seconds=10, seconds=600.0)

values = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 10**6, 2**40, 10**30]),
    st.sampled_from([0.0, -0.5, 1e-30, 1e30, float("nan"), float("inf")]),
    st.sampled_from(["", "x", "silu", "eager", "default", "float16", "sliding_attention"]),
    st.sampled_from([None, True, False, [], {}, [1], ["full_attention"], [[]], {"a": 1}]),
)
changes = st.lists(st.tuples(st.integers(0, 10**6), values), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make(root / family, config(family))
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with fork_zygote(LIMITS) as zygote:
        yield zygote


@given(family=st.sampled_from(FAMILIES), changed=changes)
@settings(max_examples=15)
def test_refused_with_a_reason_or_served_as_transformers_does(
    checkpoints: dict[str, Path],
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    changed: list[tuple[int, Any]],
) -> None:
    path = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(checkpoints[family], path)
    known = json.loads((path / "config.json").read_text())
    places = _places(known)
    for number, value in changed:
        holder, key = places[number % len(places)]
        holder[key] = value
    (path / "config.json").write_text(json.dumps(known))
    try:
        manifest = zygote.call(
            read_manifest, ManifestRequest(ModelSettings(name="m", path=str(path))), Manifest
        )
    except (BrokenPromise, DeviceError):
        raise
    except BallastError:
        return
    finally:
        assert zygote.call(abs, -1, int) == 1
    served = Served(path, model_impl="auto")
    n = min(len(TOKENS), manifest.max_model_len)
    ours = served.logits(SequenceWork("a", TOKENS[:n], 0, [0], GREEDY))[0]
    served.close()
    reference: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = reference.eval()(torch.tensor([TOKENS[:n]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)


def _places(known: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where a value can be put: every key, of objects within as well."""
    found = []
    for key, value in known.items():
        found.append((known, key))
        if isinstance(value, dict):
            found += _places(value)
    return found
