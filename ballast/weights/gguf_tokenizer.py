"""Make a tokenizer's files from a GGUF header, by the rules of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ballast.core.errors import UnsupportedModel

_PREFIX = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "<EOT>", "_<EOT>",
})  # fmt: skip
"""Control tokens that end an answer, whatever the header names: llama.cpp's."""
_CONTROL = 3
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_GPT2_SPLITS = frozenset({"gpt-2", "default", "phi-2", "jina-es", "jina-de", "mpt", "olmo"})
_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""Values of `tokenizer.ggml.pre` that split text as GPT-2 does; these, each digit by itself."""


def end_tokens(values: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer."""
    found = [values.get(_PREFIX + key) for key in _END_KEYS]
    tokens, kinds = values.get(_PREFIX + "tokens", ()), values.get(_PREFIX + "token_type", ())
    found += [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _END_TEXTS
    ]
    return list(dict.fromkeys(token for token in found if type(token) is int))


def tokenizer_files(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json.

    Raises UnsupportedModel for a tokenizer that is not known.
    """
    own = {k.removeprefix(_PREFIX): v for k, v in values.items() if k.startswith(_PREFIX)}
    tokens = own.get("tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise UnsupportedModel("GGUF: its header has no tokens of a tokenizer")
    named = {name: _token(tokens, own.get(key)) for name, key in _SPECIAL.items()}
    backend = _backend(own, str(values.get("general.architecture")), named["bos_token"])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in named.items() if token is not None},
    }
    template = values.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


def _token(tokens: list[str], number: object) -> str | None:
    if type(number) is not int or not 0 <= number < len(tokens):
        return None
    return tokens[number]


def _backend(own: Mapping[str, Any], architecture: str, bos: str | None) -> Any:
    """Return the tokenizer of the `tokenizers` library."""
    from tokenizers import pre_tokenizers, processors

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError as error:
        raise UnsupportedModel("GGUF: this version of transformers cannot read it") from error
    kind, pre = own.get("model"), own.get("pre", "default")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF: its tokenizer {kind!r:.40} is not one of gpt2, llama")
    if kind == "llama" and own.get("add_space_prefix") is False:
        raise UnsupportedModel("GGUF: its tokenizer puts no space before a text")
    known = pre in GGUF_PRE_TOKENIZER_SPLITS or pre in _GPT2_SPLITS or pre in _DIGIT_SPLITS
    if kind == "gpt2" and not known:
        raise UnsupportedModel(f"GGUF: how its tokenizer splits text, {pre!r:.40}, is not known")
    given = {"tokenizer_type": kind, "pre_tokenizer_type": pre}
    given |= {key: own[key] for key in ("tokens", "scores", "token_type", "merges") if key in own}
    backend, _ = convert_gguf_tokenizer(architecture, given)
    if kind == "gpt2" and pre in _DIGIT_SPLITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
    if own.get("add_bos_token", kind == "llama") and bos is not None:
        number = backend.token_to_id(bos)
        single, pair = f"{bos} $A", f"{bos} $A {bos}:1 $B:1"
        special = [(bos, number)]
        steps.append(
            processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
        )
    backend.post_processor = processors.Sequence(steps)
    return backend
