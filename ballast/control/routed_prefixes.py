"""Remember prefixes of prompts routed to a device, to estimate which of them its cache holds.

Used by `DeviceRecord` for prefix-aware routing. An estimate in the server: it holds no KV, and the
device may have evicted blocks that are remembered here.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from ballast.kv.prefix import PrefixIndex


class RoutedPrefixes:
    """The prefixes of one model on one device; the least recently routed is forgotten first.

    Blocks here are numbers without memory.
    """

    def __init__(self, fingerprint: str, block_tokens: int, most: int) -> None:
        """`most`: bound of the blocks that are remembered."""
        self._index = PrefixIndex(fingerprint, block_tokens)
        self._most = most
        self._numbers = itertools.count()
        self._recent: OrderedDict[int, None] = OrderedDict()
        """Blocks, the most recently routed last; within a prompt, the first block last."""

    def __len__(self) -> int:
        return len(self._recent)

    def tokens(self, prompt: Sequence[int], salt: str) -> int:
        """Return how many leading tokens of a prompt were routed before, in whole blocks."""
        return len(self._index.find(prompt, salt)) * self._index.block_tokens

    def add(self, prompt: Sequence[int], salt: str) -> None:
        """Note that a prompt is routed to the device."""
        blocks = self._index.find(prompt, salt)
        full = (len(prompt) - 1) // self._index.block_tokens
        blocks += itertools.islice(self._numbers, full - len(blocks))
        self._index.name(prompt, blocks, full, salt)
        for block in reversed(blocks):
            self._recent[block] = None
            self._recent.move_to_end(block)
        while len(self._recent) > self._most:
            block, _ = self._recent.popitem(last=False)
            self._index.forget(block)
