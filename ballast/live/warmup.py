"""Warm up a spare worker process: import, compile and build a small model ahead of need.

Called in worker processes that wait in reserve, so that one can replace a crashed worker quickly.
"""

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

    Nothing else in the process may use torch meanwhile: it changes settings of the process.
    """
    sampling.warm_up()
    inspect_model(LlamaConfig(**_SIZES))
