"""Fine-tunes of a GGUF file: what is kept of it, and what is distinct."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ballast.fleet.gguf_entry import gguf_directory
from ballast.fleet.gguf_header import TYPES, read_gguf
from ballast.weights.assemble import Recipe, Sources
from ballast.weights.gguf_blocks import dequantise
from ballast.weights.stored import find_tensors
from benchmarks import gguf_files
from benchmarks.fine_tunes import (
    KINDS,
    encoded,
    kv_bytes_per_token,
    write_checkpoint,
    write_fine_tune,
)
from benchmarks.gguf_files import TINY

STEP = {"BF16": 2**-8, "F16": 2**-11, "Q4_1": 0.1}
"""Error of rounding, of elements of about 1 in size."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.gguf"
    gguf_files.write(path, gguf_files.values(), gguf_files.tensors("Q4_1"))
    return path


def matrices(path: Path) -> dict[str, torch.Tensor]:
    """In float32."""
    found = {}
    for t in read_gguf(path).tensors.values():
        raw = bytearray(path.read_bytes()[t.start : t.start + t.n_bytes])
        if t.type.elements > 1:
            flat = dequantise(torch.frombuffer(raw, dtype=torch.uint8), t.type)
        else:
            plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            flat = torch.frombuffer(raw, dtype=plain[t.type.name]).float()
        found[t.name] = flat.view(t.shape)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_file_has_the_values_and_elements_of_its_base(base: Path, kind: str) -> None:
    target = base.with_name("same.gguf")
    write_fine_tune(base, target, kind, seed=None)
    before, after = read_gguf(base), read_gguf(target)
    assert after.values == before.values
    assert [t.shape for t in after.tensors.values()] == [t.shape for t in before.tensors.values()]
    assert {t.type.name for t in after.tensors.values() if len(t.shape) > 1} == {kind}
    wanted = matrices(base)
    for name, found in matrices(target).items():
        error = (found - wanted[name]).abs().max()
        assert error <= STEP[kind] * wanted[name].abs().max(), name


def test_fine_tunes_differ_in_every_matrix_by_a_change_of_low_rank(base: Path) -> None:
    paths = [base.with_name(f"{seed}.gguf") for seed in (0, 1)]
    for seed, path in enumerate(paths):
        write_fine_tune(base, path, "F16", seed)
    one, other = map(matrices, paths)
    for name, wanted in matrices(base).items():
        if wanted.ndim == 1:
            assert torch.equal(one[name], wanted)
            continue
        assert not torch.equal(one[name], other[name])
        change = one[name] - wanted
        assert 0.005 < float(change.std() / wanted.std()) < 0.02
        sizes = torch.linalg.svdvals(change)
        assert float(sizes[4] / sizes[0]) < 0.2, "beyond rank 4 there is rounding alone"


def test_elements_are_rounded_to_the_nearest() -> None:
    matrix = torch.linspace(-1, 2, 64).view(2, 32)
    raw = torch.frombuffer(bytearray(encoded(matrix, "Q4_1")), dtype=torch.uint8)
    kind = next(t for t in TYPES.values() if t.name == "Q4_1")
    found = dequantise(raw, kind).view(2, 32)
    spread = (matrix.amax(dim=1) - matrix.amin(dim=1)) / 15
    assert bool(((found - matrix).abs() <= spread[:, None] * 0.52).all())
    with pytest.raises(ValueError, match="Q9"):
        encoded(matrix, "Q9")


def test_a_checkpoint_has_the_tensors_of_its_file(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_checkpoint(base, tmp_path / "checkpoint")
    found = load_file(tmp_path / "checkpoint" / "model.safetensors")
    made = Path(gguf_directory(base, "path", str(base)))
    plan = {name: Recipe.of(stored) for name, stored in find_tensors(made).items()}
    assert found.keys() == plan.keys()
    with Sources(plan.values()) as sources:
        for name, recipe in plan.items():
            assert torch.equal(found[name], sources.read(recipe, torch.bfloat16)), name
    assert (tmp_path / "checkpoint" / "tokenizer.json").is_file()


def test_kv_of_a_token() -> None:
    narrow = TINY.hidden // TINY.heads * TINY.kv_heads
    wanted = 2 * TINY.layers * narrow * np.dtype(np.float16).itemsize
    assert kv_bytes_per_token(gguf_files.values()) == wanted
