"""Random checkpoints for tests of the live engine."""

from __future__ import annotations

from pathlib import Path

import torch
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
