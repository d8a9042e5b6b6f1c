"""Define what streams a model's layers, weights and KV alike, as the engine makes and calls it.

Live devices, groups of ranks, the simulator and replays implement it over `ballast.residency`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ballast.core.model import ModelSpec
from ballast.kv.kv_stream import KvStream
from ballast.weights.weight_stream import WeightStream


class ModelStream(WeightStream, KvStream, Protocol):
    """Streams layers of one model: of its weights, its KV, or both in the same jobs."""


MakeStream = Callable[[ModelSpec], ModelStream]
"""Makes the stream of a model, to which its weights and KV are added where they may stream."""
