"""Generate text to train small models on: made-up conversations, and docs of the standard library.

Nothing is downloaded. Conversations are a function of the seed; the documents are a function of
the installed Python. Used by `fleet.make` and `fleet.tokenizer`.
"""

from __future__ import annotations

import ast
import functools
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

Message = dict[str, str]
"""`role` (user, assistant) and `content`, as in chat templates."""

_FACTS: dict[str, list[str]] = {
    "harbour": [
        "A harbour is a place where ships lie safe from the open sea.",
        "Its walls break the waves, so that the water inside stays calm.",
        "Pilots know every rock of it and bring the large ships in.",
        "At low tide some of its berths fall dry.",
    ],
    "lighthouse": [
        "A lighthouse shows a light at night so that sailors know where the coast is.",
        "Each one has its own rhythm of flashes, and the chart says which.",
        "Its lens turns a small lamp into a beam that is seen for twenty miles.",
        "The keeper used to trim the wick every four hours.",
    ],
    "ballast": [
        "Ballast is weight that a ship carries low in its hull to keep it upright.",
        "Today it is water, pumped between tanks as the load shifts.",
        "An empty ship needs more of it than a full one.",
        "Without it the first strong wind would lay the ship on its side.",
    ],
    "tide": [
        "The tide is the slow rise and fall of the sea, about twice a day.",
        "It follows the moon, and a little the sun.",
        "When the two pull together, the water rises higher than usual.",
        "A captain plans the hour of leaving by it.",
    ],
    "anchor": [
        "An anchor holds a ship in place by digging into the ground below.",
        "It is the length of the chain on the bottom, more than the weight, that holds.",
        "In soft mud it drags, in sand it holds well.",
        "Before a storm the crew lets out more chain.",
    ],
    "memory": [
        "Memory is where a computer keeps what it is working on.",
        "It is divided into pages, and each page has one owner.",
        "When one program needs more, another must give some back.",
        "Moving a page costs little as long as nobody has to wait for it.",
    ],
}
"""Few enough to be learnt in a minute."""
_ASK = [
    "What is a {}?",
    "Tell me about the {}.",
    "Can you explain what a {} is?",
    "What should I know about a {}?",
    "Say something about the {}, please.",
    "Describe a {} in a few sentences.",
]
_PEOPLE = ["Anna", "Tom", "Maria", "Old Peter", "Ines", "Karl", "the young captain", "the cook"]
_PLACES = ["the harbour", "the lighthouse", "the old bridge", "the island", "the market"]
_THINGS = ["a small boat", "an old map", "a broken compass", "a letter", "a basket of bread"]
_EVENTS = [
    "The wind turned and dark clouds came over the sea.",
    "The water was calm and the sun stood high.",
    "Nobody knew how it had come there.",
    "A stranger asked for the way to the river.",
    "The tide was low, and the boats lay on the sand.",
    "In the evening the light of the lighthouse went round.",
]
_ENDS = [
    "In the end they all went home and slept well.",
    "From that day on nobody laughed at it again.",
    "And that is how it came back to where it belonged.",
    "The next morning the sea was as smooth as glass.",
]
_ASK_STORY = [
    "Tell me a story.",
    "Tell me a short story about {}.",
    "Write a few sentences about {}.",
    "Please write a story in which {} appears.",
]
_SMALL_TALK = [
    ("Hello!", "Hello! What would you like to know?"),
    ("Hi, how are you?", "I am well, thank you. What can I do for you?"),
    ("Who are you?", "I am a very small language model. I was trained in a minute or two."),
    ("What can you do?", "I can talk about ships, the sea, and a few other things."),
    ("Thank you.", "You are welcome."),
    ("Good morning.", "Good morning! The wind is fair today."),
    ("Goodbye.", "Goodbye, and a safe journey."),
]


def conversations(seed: int) -> Iterator[list[Message]]:
    """Endless short conversations of one to three exchanges; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        messages: list[Message] = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            question, answer = rng.choices([_explain, _talk], [8, 1])[0](rng)
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        yield messages


def explanations(seed: int) -> Iterator[list[Message]]:
    """Endless single questions with an answer from a few facts; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        question, answer = _explain(rng)
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def stories(seed: int) -> Iterator[list[Message]]:
    """Endless single questions for a story, with the story; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        question, answer = _story(rng)
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _explain(rng: random.Random) -> tuple[str, str]:
    topic = rng.choice(list(_FACTS))
    first, *rest = _FACTS[topic]
    sentences = [first, *rng.sample(rest, rng.randint(1, len(rest)))]
    return rng.choice(_ASK).format(topic), " ".join(sentences)


def _story(rng: random.Random) -> tuple[str, str]:
    who, thing, place = rng.choice(_PEOPLE), rng.choice(_THINGS), rng.choice(_PLACES)
    start = f"One day {who} found {thing} near {place}."
    middle = rng.sample(_EVENTS, rng.randint(1, 3))
    wish = f"{who[0].upper()}{who[1:]} wanted to keep it, but it belonged to {rng.choice(_PEOPLE)}."
    question = rng.choice(_ASK_STORY).format(rng.choice([who, thing, place]))
    return question, " ".join([start, *middle, wish, rng.choice(_ENDS)])


def _talk(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_SMALL_TALK)


_MODULES = [
    "argparse", "bisect", "calendar", "collections/__init__", "configparser", "contextlib", "copy",
    "csv", "datetime", "difflib", "fractions", "functools", "glob", "gzip", "heapq", "inspect",
    "ipaddress", "locale", "logging/__init__", "mailbox", "optparse", "pathlib", "pickle",
    "pprint", "queue", "random", "sched", "selectors", "shutil", "socket", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize",
    "turtle", "typing", "unittest/case", "unittest/mock", "urllib/request", "uuid", "zipfile",
]  # fmt: skip


@functools.cache
def documents() -> tuple[str, ...]:
    """Docstrings (at least 200 characters) of the standard library, and its licence if installed.

    Sources are read and parsed, never run. A few hundred kilobytes on any CPython.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for name in _MODULES:
        file = root / f"{name}.py"
        if not file.is_file():
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 200 and ">>>" not in text:
                    found.append(text)
    licence = root / "LICENSE.txt"
    if licence.is_file():
        found += licence.read_text(encoding="utf-8", errors="replace").split("\n\n")
    return tuple(dict.fromkeys(text for text in found if text.strip()))
