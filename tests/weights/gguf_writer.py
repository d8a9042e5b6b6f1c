"""Write small GGUF files of Llama-like models, with blocks of random bits."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ballast.fleet.gguf_header import TYPES

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its scales, if not at its start alone."""
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 256, 4, 2, 256, 2
TOKENS = [*bytes_to_unicode().values(), "<|im_start|>", "<|im_end|>", "ab", "cd"]


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
    for at in scales_at(kind):
        size = 0.001 if kind.endswith("_K") else 0.02
        scale = rng.uniform(-size, size, (n, 1)).astype("<f2")
        made[:, at : at + 2] = scale.view(np.uint8)
    return made.tobytes()


def values(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """The header's values."""
    own = {
        "context_length": 128,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "embedding_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": one for key, one in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1, 1],
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        **more,
    }


def tensors(kind: str, architecture: str = "llama") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and row-major shapes by name."""
    narrow = HIDDEN // HEADS * KV_HEADS
    found = {
        "token_embd.weight": (kind, (len(TOKENS), HIDDEN)),
        "output_norm.weight": ("F32", (HIDDEN,)),
    }
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (narrow, HIDDEN),
        "attn_v": (narrow, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            found[f"blk.{i}.{norm}.weight"] = ("F32", (HIDDEN,))
        for name, shape in shapes.items():
            found[f"blk.{i}.{name}.weight"] = (kind, shape)
        if architecture == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                found[f"blk.{i}.{name}.bias"] = ("F32", shapes[name][:1])
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{i}.{name}.weight"] = ("F32", (HIDDEN // HEADS,))
    return found


def write(
    path: Path, header: dict[str, Any], wanted: dict[str, tuple[str, tuple[int, ...]]]
) -> dict[str, bytes]:
    """Write a file; returns the tensors' bytes by name."""
    made = {n: blocks(kind, shape, i) for i, (n, (kind, shape)) in enumerate(wanted.items())}
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(wanted), len(header))
    out += b"".join(text(key) + value(one) for key, one in header.items())
    at = 0
    for name, (kind, shape) in wanted.items():
        out += text(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], NUMBERS[kind], at)
        at += -(-len(made[name]) // 32) * 32
    out += bytes(-len(out) % 32)
    path.write_bytes(out + b"".join(b + bytes(-len(b) % 32) for b in made.values()))
    return made
