"""Write GGUF files of Llama-like models with blocks of random bits, and copies in bfloat16."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ballast.fleet.gguf_header import TYPES, TensorType, read_gguf
from ballast.weights.config import config_of, read_config
from ballast.weights.gguf_blocks import dequantise
from ballast.weights.gguf_config import tensor_name

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "IQ1_M": ()}
"""Where a block has its scales, if not at its start alone."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOKENS = [*bytes_to_unicode().values(), "<|im_start|>", "<|im_end|>", "ab", "cd"]


@dataclass(frozen=True)
class GgufSizes:
    """Sizes of a model; `hidden` and `inner` are whole blocks of all types."""

    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    inner: int = 256
    layers: int = 2
    vocab: int = len(TOKENS)
    context: int = 128


TINY = GgufSizes()


def scales_at(kind: str) -> tuple[int, ...]:
    """Where a block has its float16 scales."""
    return _HALVES.get(kind, (0,))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(given: Any) -> bytes:
    """A value with the number of its type before it."""
    if isinstance(given, list):
        inner = [value(one) for one in given]
        kind = inner[0][:4]
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(inner))
            + b"".join(one[4:] for one in inner)
        )
    if isinstance(given, bool):
        return struct.pack("<I?", 7, given)
    if isinstance(given, int):
        return struct.pack("<II", 4, given)
    if isinstance(given, float):
        return struct.pack("<If", 6, given)
    return struct.pack("<I", 8) + text(given)


def blocks(kind: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Random elements of this type, of about 1/16 in size; vectors: about 1."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        plain = (rng.standard_normal(shape) / 16 + (len(shape) == 1)).astype("<f4")
        if kind == "F16":
            return plain.astype("<f2").tobytes()
        halves: bytes = (plain.view("<u4") >> 16).astype("<u2").tobytes()
        return plain.tobytes() if kind == "F32" else halves
    found = TYPES[NUMBERS[kind]]
    n = int(np.prod(shape)) // found.elements
    made = rng.integers(0, 256, (n, found.n_bytes), dtype=np.uint8)
    scales = rng.uniform(-1, 1, (len(scales_at(kind)), n, 1))
    size = 2**-10
    for _ in range(2):  # elements are in proportion to the scales
        for at, scale in zip(scales_at(kind), scales, strict=True):
            made[:, at : at + 2] = (size * scale).astype("<f2").view(np.uint8)
        size *= 2**-4 / float(elements(made.tobytes(), found).std())
    if kind == "IQ1_M":  # whose scale lies in four parts, the highest here: of about 2^-9
        made[:, 55] = made[:, 55] & 15 | 16
    return made.tobytes()


def values(architecture: str = "llama", sizes: GgufSizes = TINY, **more: Any) -> dict[str, Any]:
    """The header's values."""
    others = sizes.vocab - len(TOKENS)
    own = {
        "context_length": sizes.context,
        "block_count": sizes.layers,
        "feed_forward_length": sizes.inner,
        "embedding_length": sizes.hidden,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": one for key, one in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS + [f"<other {i}>" for i in range(others)],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1, 1] + [5] * others,
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        **more,
    }


def tensors(
    kind: str, architecture: str = "llama", sizes: GgufSizes = TINY
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and row-major shapes by name."""
    hidden, inner = sizes.hidden, sizes.inner
    narrow = hidden // sizes.heads * sizes.kv_heads
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": (kind, (sizes.vocab, hidden)),
        "output_norm.weight": ("F32", (hidden,)),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (hidden, hidden),
        "attn_k": (narrow, hidden),
        "attn_v": (narrow, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for i in range(sizes.layers):
        for norm in ("attn_norm", "ffn_norm"):
            found[f"blk.{i}.{norm}.weight"] = ("F32", (hidden,))
        for name, shape in shapes.items():
            found[f"blk.{i}.{name}.weight"] = (kind, shape)
        if architecture == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                found[f"blk.{i}.{name}.bias"] = ("F32", shapes[name][:1])
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{i}.{name}.weight"] = ("F32", (hidden // sizes.heads,))
    return found


def write(
    path: Path, header: dict[str, Any], wanted: dict[str, tuple[str, tuple[int, ...]]]
) -> dict[str, bytes]:
    """Write a file of random blocks; returns the tensors' bytes by name."""
    made = {n: blocks(kind, shape, i) for i, (n, (kind, shape)) in enumerate(wanted.items())}
    write_tensors(path, header, wanted, made)
    return made


def write_tensors(
    path: Path,
    header: dict[str, Any],
    wanted: dict[str, tuple[str, tuple[int, ...]]],
    made: dict[str, bytes],
) -> None:
    """Write a file of the tensors' bytes by name."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(wanted), len(header))
    out += b"".join(text(key) + value(one) for key, one in header.items())
    at = 0
    for name, (kind, shape) in wanted.items():
        out += text(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], NUMBERS[kind], at)
        at += -(-len(made[name]) // 32) * 32
    out += bytes(-len(out) % 32)
    path.write_bytes(out + b"".join(b + bytes(-len(b) % 32) for b in made.values()))


def write_bfloat16(source: Path, target: Path) -> None:
    """Write a copy of a file whose matrices are dequantised to BF16."""
    header = read_gguf(source)
    wanted, made = {}, {}
    with source.open("rb") as file:
        for name, t in header.tensors.items():
            file.seek(t.start)
            made[name] = file.read(t.n_bytes)
            wanted[name] = (t.type.name, t.shape)
            if len(t.shape) > 1 and t.type.name != "BF16":
                wanted[name] = ("BF16", t.shape)
                plain = elements(made[name], t.type).bfloat16()
                made[name] = plain.view(torch.int16).numpy().tobytes()
    values = {k: v for k, v in header.values.items() if k != "general.alignment"}
    write_tensors(target, values, wanted, made)


def elements(data: bytes, kind: TensorType) -> torch.Tensor:
    """The elements of a tensor's bytes, float32, in the file's order."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return raw.view(PLAIN[kind.name]).float() if kind.name in PLAIN else dequantise(raw, kind)


def reference(directory: Path, path: Path) -> torch.nn.Module:
    """The model of `transformers`, float32, with the weights of the file at `path` as dequantised;
    `directory`: its checkpoint directory (`gguf_directory`)."""
    values = read_config(directory)
    config = config_of(values)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    state = model.state_dict()
    header = read_gguf(path)
    with path.open("rb") as file:
        for name, t in header.tensors.items():
            file.seek(t.start)
            target = state[tensor_name(name)]
            found = elements(file.read(t.n_bytes), t.type).view(target.shape)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            n = heads.get(name.split(".")[-2])
            if n and values["model_type"] == "llama":
                rows = found.shape[0] // n // 2
                found = found.view(n, rows, 2, -1).swapaxes(1, 2).reshape(found.shape)
            target.copy_(found)
    return model.eval()
