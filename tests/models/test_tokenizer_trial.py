"""A tokenizer that would hang or end the process that loads it does so in a child."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ballast.core.errors import CheckpointError, LimitExceeded
from ballast.core.units import GiB
from ballast.fleet.tokenizer import CHAT_TEMPLATE, train_tokenizer
from ballast.isolation.limits import Limits
from ballast.isolation.zygote import Zygote
from ballast.models.tokenizer_trial import vet_tokenizer

LIMITS = Limits(memory_bytes=1 * GiB, cpu_seconds=1)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    train_tokenizer(["hello world"] * 10, 300, 64).save_pretrained(tmp_path)
    return tmp_path


class Panic(BaseException):
    """As native code raises it: no Exception."""


def panics(*arguments: object, **more: object) -> None:
    raise Panic("not yet implemented")


def loops(*arguments: object, **more: object) -> None:
    for _ in itertools.count():
        pass


def takes_memory(*arguments: object, **more: object) -> None:
    bytearray(2 * GiB)


@pytest.mark.parametrize(
    ("load", "kind", "reason"),
    [
        (panics, CheckpointError, "no usable tokenizer: Panic: not yet implemented"),
        (loops, LimitExceeded, "loading its tokenizer, it took more than 1 s of processor time"),
        (takes_memory, LimitExceeded, "loading its tokenizer, it took more than 1GiB of memory"),
    ],
)
def test_a_tokenizer_that_would_hang_or_end_a_server_is_refused(
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[..., None],
    kind: type[Exception],
    reason: str,
) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    with Zygote.fork(limits=LIMITS) as zygote, pytest.raises(kind, match=reason) as raised:
        vet_tokenizer(tokenizer, zygote)
    assert str(raised.value).startswith(str(tokenizer))


def template(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "chat_template.jinja").write_text(text)

    return change


def no_vocabulary(path: Path) -> None:
    file = path / "tokenizer.json"
    known = json.loads(file.read_text())
    known["model"] = {"type": "Unigram", "unk_id": 0, "vocab": []}
    file.write_text(json.dumps(known))


def nothing(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def nested(path: Path) -> None:
    (path / "tokenizer_config.json").write_text("[" * 200_000)


HARMLESS = {
    "usual": template(CHAT_TEMPLATE),
    "a template that never ends": template("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3),
    "a template with faults": template("{% for %}"),
    "no vocabulary": no_vocabulary,
    "no tokenizer": nothing,
    "nested": nested,
}


def test_what_the_server_names_itself_passes(tokenizer: Path, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in tokenizer.iterdir()}
    with Zygote.fork() as zygote:
        for name, change in HARMLESS.items():
            path = tmp_path / name
            path.mkdir()
            for file, content in files.items():
                (path / file).write_bytes(content)
            change(path)
            vet_tokenizer(path, zygote)


def test_a_tokenizer_that_panics_in_use_is_refused(tokenizer: Path) -> None:
    file = tokenizer / "tokenizer.json"
    changed = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with Zygote.fork() as zygote, pytest.raises(CheckpointError, match="chunk size"):
        vet_tokenizer(tokenizer, zygote)
