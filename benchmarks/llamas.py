"""A fleet of random Llamas in bfloat16, for benchmarks of what surrounds the models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer

CONTEXT = 1024
VOCAB = 16_000
"""At most; as many as the texts give."""
TOKENS = range(10, 1000)
"""To draw prompts from."""
ADMIN_KEY = "of-the-benchmark"


@dataclass(frozen=True)
class Size:
    """A random Llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int


LLAMA_110M = Size("110M", 768, 2048, 12, 12)
LLAMA_6M = Size("6M", 256, 704, 6, 4)


def make_fleet_file(directory: Path, served: dict[str, Size], limits: str = "{}") -> Path:
    """A fleet file with the models of `served` that are not called `spare...`, of which there are
    only checkpoints, at their names. `limits` is of each model. The budget is ample."""
    tokenizer = train_tokenizer(documents(), VOCAB, CONTEXT)
    torch.manual_seed(0)
    models = []
    for name, size in served.items():
        config = LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            vocab_size=len(tokenizer),
            max_position_embeddings=CONTEXT,
            initializer_range=0.05,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
        if not name.startswith("spare"):
            models.append(f"{{name: {name}, path: {name}, limits: {limits}}}")
    file = directory / "fleet.yaml"
    file.write_text(
        "devices: [{budget: 1536MiB, prefix_cache: false}]\n"
        f"models: [{', '.join(models)}]\n"
        f"server: {{admin_key: {ADMIN_KEY}}}\n"
    )
    return file
