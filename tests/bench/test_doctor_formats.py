"""What the doctor says of quantised files, format by format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ballast.bench import doctor_fleet
from ballast.bench.doctor_finding import Verdict
from ballast.core.units import MiB
from ballast.fleet import gguf_entry
from ballast.fleet.gguf_entry import gguf_directory
from ballast.weights.gguf_export import checkpoint_files
from benchmarks import gguf_files, quantised
from benchmarks.exactness import fleet
from benchmarks.gguf_files import GgufSizes
from benchmarks.quantised_files import MXFP4

SIZES = GgufSizes(hidden=128, inner=192, vocab=331, context=128)
FORMATS = {
    "gptq-order": "GPTQ int4",
    "awq": "AWQ int4",
    "ct-int4-zeros": "int4",
    "ct-int8": "int8",
    "fp8-block": "FP8",
    "bnb-nf4-nested": "NF4",
    "bnb-int8": "bitsandbytes int8",
    MXFP4: "MXFP4",
}


def said(directory: Path) -> list[tuple[Verdict, str]]:
    found = doctor_fleet.fleet(fleet({"m": directory}, 64 * MiB))
    return [(f.verdict, f.found) for f in found if f.check == "m"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told(name: str, tmp_path: Path) -> None:
    if name == MXFP4:
        quantised.make_experts(tmp_path, SIZES)
    else:
        quantised.make(tmp_path, name, SIZES)
    told = f"quantised: {FORMATS[name]} stay packed in memory"
    assert (Verdict.OK, told) in said(tmp_path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
def test_a_gguf_file_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Where a header is parsed is no matter here, and a process for it takes a second to start.
    monkeypatch.setattr(gguf_entry, "_exported", lambda parts, key, text: checkpoint_files(parts))
    gguf_files.write(tmp_path / "m.gguf", gguf_files.values(), gguf_files.tensors(kind))
    directory = Path(gguf_directory(tmp_path / "m.gguf", "path", "m"))
    (found,) = [words for verdict, words in said(directory) if words.startswith("a GGUF file")]
    if kind == "F16":
        assert found == "a GGUF file: its matrices are served in float32"
    else:
        assert found == f"a GGUF file: {kind} stay packed in memory"


def test_what_is_not_read_fails_by_its_name(tmp_path: Path) -> None:
    quantised.make(tmp_path, "gptq", SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ((verdict, words),) = said(tmp_path)
    assert verdict is Verdict.FAIL
    assert "quantised (aqlm)" in words
