"""What building a device takes besides its models, done ahead of time in a process that waits."""

from __future__ import annotations

from transformers import LlamaConfig

import ballast.live.device  # noqa: F401
from ballast.kernels import sampling
from ballast.weights.inspection import inspect_model

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def warm_up() -> None:
    """Import, compile, and build a small model of the commonest kind, without memory.

    Not beside anything else that uses torch: it changes settings of the process meanwhile.
    """
    sampling.warm_up()
    inspect_model(LlamaConfig(**_SIZES))
