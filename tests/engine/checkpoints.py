"""Random checkpoints for tests of the live engine."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 256


def make_llama(directory: Path, seed: int, **changes: int) -> Path:
    """A tiny random Llama with an untied head and weights large enough to be lively."""
    torch.manual_seed(seed)
    sizes: dict[str, int] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        **changes,
    }
    config = LlamaConfig(**sizes, initializer_range=0.2, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_base_and_tuned(root: Path) -> tuple[Path, Path]:
    """A model, and one that has its embeddings, last norm and head but other layers."""
    base, tuned = make_llama(root / "base", 0), make_llama(root / "tuned", 1)
    (file,) = tuned.glob("*.safetensors")
    kept = load_file(base / file.name)
    mixed = {
        name: kept[name] if name.startswith(("model.embed", "model.norm", "lm_head")) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(mixed, file, {"format": "pt"})
    return base, tuned
