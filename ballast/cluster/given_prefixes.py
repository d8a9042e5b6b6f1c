"""Prefixes of prompts that a device was given: what its cache holds, as far as is known here."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from ballast.kv.prefix import PrefixIndex


class GivenPrefixes:
    """Of one model on one device, the least recently given forgotten first.

    Blocks are numbered here and have no memory; the device may have evicted what is remembered.
    """

    def __init__(self, fingerprint: str, block_tokens: int, most: int) -> None:
        """`most`: blocks that are remembered."""
        self._index = PrefixIndex(fingerprint, block_tokens)
        self._most = most
        self._numbers = itertools.count()
        self._given: OrderedDict[int, None] = OrderedDict()
        """Blocks, the most recently given last; of one prompt the first."""

    def __len__(self) -> int:
        return len(self._given)

    def tokens(self, prompt: Sequence[int], salt: str) -> int:
        """Of a prompt, those at its beginning that were given before, in whole blocks."""
        return len(self._index.find(prompt, salt)) * self._index.block_tokens

    def add(self, prompt: Sequence[int], salt: str) -> None:
        """The device gets this prompt."""
        blocks = self._index.find(prompt, salt)
        full = (len(prompt) - 1) // self._index.block_tokens
        blocks += itertools.islice(self._numbers, full - len(blocks))
        self._index.name(prompt, blocks, full, salt)
        for block in reversed(blocks):
            self._given[block] = None
            self._given.move_to_end(block)
        while len(self._given) > self._most:
            block, _ = self._given.popitem(last=False)
            self._index.forget(block)
