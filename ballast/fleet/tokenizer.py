"""Train a byte-level BPE tokenizer with a chat template, for the models of a made fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ballast.fleet.text import Message

END, PAD = "<|end|>", "<|pad|>"
_ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + _ROLES["assistant"] + "{% endif %}"
)


def chat_text(messages: list[Message]) -> str:
    """Render `messages` as `CHAT_TEMPLATE` does, without the cost of the template engine."""
    return "".join(_ROLES[m["role"]] + m["content"] + END for m in messages)


def train_tokenizer(texts: Iterable[str], vocab: int, context: int) -> Any:
    """Train a `PreTrainedTokenizerFast` of at most `vocab` tokens: 256 bytes, specials, merges.

    Every text has an encoding and decodes to itself. `context` becomes its `model_max_length`.
    """
    special = [END, PAD, *_ROLES.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(_ROLES.values()),
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
