"""Bound the number of characters that one token of a tokenizer can stand for.

With it, a text that exceeds a model's context by far is refused before tokenizing it, which takes
about 180 times its length in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
"""White space: all of it lies below U+3001. Includes what Rust's `char::is_whitespace` knows."""

_KEEPS = ("Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel")
"""Normalizers that never shorten a text."""
_COMPOSES = ("NFC", "NFKC")
_MOST_COMPOSED = 4
"""Most characters that composition merges into one (U+1F82, for example)."""
_SPLITS = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts")
"""Pre-tokenizers that drop nothing, unless their behaviour is to remove."""
_DROPS_BLANKS = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")


@dataclass(frozen=True, slots=True)
class TextBound:
    """Bound of the characters of text that one token stands for."""

    characters: int
    counts_blanks: bool
    """Whether white space counts; false where the tokenizer drops it, or a token absorbs any amount
    of it."""

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` certainly has more than `tokens` tokens."""
        most = tokens * self.characters
        if len(text) <= most or self.counts_blanks:
            return len(text) > most
        return len(text) - sum(text.count(blank) for blank in _BLANKS) > most


def text_bound(backend: Any) -> TextBound | None:
    """Derive the bound of a `tokenizers.Tokenizer`; None where a part of it may drop text."""
    parts = list(_parts(backend.normalizer, "normalizers"))
    factor = math.prod(_shrinks(part) for part in parts)
    pre_tokenizers = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    kinds = {part["type"] for part in (*parts, *pre_tokenizers)}
    vocab = backend.get_vocab(with_added_tokens=True)
    if not _is_complete(backend.model, vocab, byte_level="ByteLevel" in kinds):
        return None
    for part in pre_tokenizers:
        removes = part.get("behavior") == "Removed"
        if removes or part["type"] not in (*_SPLITS, *_DROPS_BLANKS):
            return None
    if not math.isfinite(factor):
        return None
    added = backend.get_added_tokens_decoder().values()
    absorbs = any(token.lstrip or token.rstrip for token in added)
    longest = max(map(len, (*vocab, *(_normalized(backend, token.content) for token in added))))
    return TextBound(longest * int(factor), not absorbs and kinds.isdisjoint(_DROPS_BLANKS))


def _normalized(backend: Any, text: str) -> str:
    normalizer = backend.normalizer
    return text if normalizer is None else str(normalizer.normalize_str(text))


def _parts(component: Any, several: str) -> Iterator[dict[str, Any]]:
    """Yield the state of a component; of a sequence, that of each member."""
    if component is not None:
        yield from _members(json.loads(component.__getstate__()), several)


def _members(state: dict[str, Any], several: str) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for member in state[several]:
            yield from _members(member, several)
    else:
        yield state


def _shrinks(normalizer: Mapping[str, Any]) -> float:
    """Most characters that a normalizer turns into one; infinite where there is no bound."""
    kind = normalizer["type"]
    if kind in _KEEPS:
        return 1
    if kind in _COMPOSES:
        return _MOST_COMPOSED
    pattern = normalizer.get("pattern", {}).get("String")
    if kind == "Replace" and pattern and normalizer["content"]:
        return math.ceil(len(pattern) / len(normalizer["content"]))
    return math.inf


def _is_complete(model: Any, vocab: Collection[str], *, byte_level: bool) -> bool:
    """Whether each character of a text becomes a token, unknown ones one token each."""
    if type(model).__name__ != "BPE":
        return False  # other models merge any number of unknown characters into one token
    if byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        if all(character in vocab for character in ByteLevel.alphabet()):
            return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
