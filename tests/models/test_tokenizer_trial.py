"""What a tokenizer or a chat template does that never ends, it does where it can do no harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ballast.core.errors import CheckpointError, LimitExceeded
from ballast.core.units import GiB
from ballast.fleet.tokenizer import CHAT_TEMPLATE, train_tokenizer
from ballast.isolation.limits import Limits
from ballast.isolation.zygote import Zygote
from ballast.models import tokenizer_trial
from ballast.models.tokenizer_trial import vet_tokenizer


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_trial, "TEMPLATE_SECONDS", 0.5)
        zygote = Zygote.fork(limits=Limits(memory_bytes=1 * GiB, cpu_seconds=20))
    with zygote:
        yield zygote


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    train_tokenizer(["hello world"] * 10, 300, 64).save_pretrained(tmp_path)
    return tmp_path


def template(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "chat_template.jinja").write_text(text)

    return change


def panic(path: Path) -> None:
    """A pre-tokenizer whose pattern the library cannot compile makes it panic, or refuse."""
    file = path / "tokenizer.json"
    known = json.loads(file.read_text())
    known["model"] = {"type": "Unigram", "unk_id": 0, "vocab": []}
    file.write_text(json.dumps(known))


def nothing(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def nested(path: Path) -> None:
    (path / "tokenizer_config.json").write_text("[" * 200_000)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x" + (
    "{% endfor %}" * 3
)
FAULTS = {
    "loops": (template(LOOPS), r"chat template, one short message took more than 0\.5 s"),
    "memory": (template("{% set x = 'x' * 10000000000 %}{{ x }}"), "more than 1GiB of memory"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_would_hang_or_end_a_server(what: str, zygote: Zygote, tokenizer: Path) -> None:
    change, reason = FAULTS[what]
    change(tokenizer)
    with pytest.raises((LimitExceeded, CheckpointError), match=reason) as raised:
        vet_tokenizer(tokenizer, zygote)
    assert str(raised.value).startswith(str(tokenizer))


HARMLESS = {
    "usual": template(CHAT_TEMPLATE),
    "refuses": template("{{ raise_exception('roles must alternate') }}"),
    "syntax": template("{% for %}"),
    "no vocabulary": panic,
    "no tokenizer": nothing,
    "nested": nested,
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_the_server_says_itself(what: str, zygote: Zygote, tokenizer: Path) -> None:
    HARMLESS[what](tokenizer)
    vet_tokenizer(tokenizer, zygote)


def test_a_panic_of_native_code(
    zygote: Zygote, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no Exception, and passes by whoever catches these."""

    class Panic(BaseException):
        pass

    def panicking(*arguments: object, **more: object) -> None:
        raise Panic("not yet implemented")

    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panicking)
    with (
        Zygote.fork() as own,
        pytest.raises(CheckpointError, match="no usable tokenizer: Panic: not yet implemented"),
    ):
        vet_tokenizer(tokenizer, own)
