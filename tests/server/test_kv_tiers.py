"""KV tiers over HTTP: from where cached tokens came, sizes, and what an order scrubs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from ballast.cli import app
from ballast.core.units import MiB
from ballast.fleet.make import make_fleet
from tests.server.process import ServerProcess, server, until

OPERATOR = "sk-admin-of-the-tests"
KEYS = {"one": "sk-one-of-the-tests", "two": "sk-two-of-the-tests"}
QUESTION = "the same long question again and again " * 60
OUTPUT = 4


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Models so large that fetching the question's KV is faster than computing it."""
    directory = tmp_path_factory.mktemp("tiered")
    made = make_fleet(
        directory, n_models=2, steps=0, size="small", dtype="float32", budget="192MiB", seed=1
    )
    fleet = yaml.safe_load(made.file.read_text())
    fleet["devices"][0]["threads"] = 1
    fleet |= {"kv_host": "64MiB", "kv_disk": {"path": "kv", "bytes": "96MiB"}}
    keys = [{"name": name, "key": key} for name, key in KEYS.items()]
    fleet["server"] = {"admin_key": OPERATOR, "keys": keys}
    made.file.write_text(yaml.safe_dump(fleet))
    with server(made.file) as running:
        yield running


def order(to: ServerProcess, method: str, path: str) -> Any:
    authorization = {"Authorization": f"Bearer {OPERATOR}"}
    answer = to.http.request(method, f"/admin/{path}", headers=authorization)
    assert answer.is_success, answer.text
    return answer.json()


def kv(to: ServerProcess, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["kv", *arguments, "--url", to.base, "--key", OPERATOR])


def blocks(to: ServerProcess) -> dict[str, int]:
    return {t["tier"]: t["blocks"] for t in order(to, "GET", "kv")["tiers"]}


@dataclass
class Answer:
    text: str
    full: int
    """Blocks of KV that it has filled."""
    tiers: set[str]
    """Where KV of its prompt was."""


def asked(to: ServerProcess, model: str, key: str) -> Answer:
    """The answer of a model that has been evicted, so that its device has no KV."""
    order(to, "POST", f"models/{model}/evict")
    answer = to.http.post(
        "/v1/completions",
        headers={"Authorization": f"Bearer {KEYS[key]}"},
        json={"model": model, "prompt": QUESTION, "max_tokens": OUTPUT, "temperature": 0},
    )
    assert answer.is_success, answer.text
    found = answer.json()
    usage = found["usage"]
    metrics = to.http.get("/metrics", headers={"Authorization": f"Bearer {OPERATOR}"}).text
    size = re.search(rf'block_size="(\d+)"[^}}]*model_name="{model}"', metrics)
    assert size is not None, metrics
    by_tier = usage["prompt_tokens_details"].get("cached_tokens_by_tier", {})
    return Answer(
        found["choices"][0]["text"],
        (usage["prompt_tokens"] + OUTPUT - 1) // int(size[1]),
        {tier for tier, tokens in by_tier.items() if tokens},
    )


def test_usage_says_from_which_tier_tokens_came_and_an_order_scrubs_all(
    tiered: ServerProcess,
) -> None:
    """A key's KV, a model's, and that of a model which is removed."""
    first = asked(tiered, "atlas-chat", "one")
    n = first.full
    assert first.tiers == set()
    until(lambda: blocks(tiered) == {"host": n, "disk": n})
    again = asked(tiered, "atlas-chat", "one")
    assert (again.text, again.tiers) == (first.text, {"host"})
    other = asked(tiered, "atlas-chat", "two")
    assert (other.text, other.tiers) == (first.text, set()), "keys share nothing"
    until(lambda: blocks(tiered) == {"host": 2 * n, "disk": 2 * n})

    gone = kv(tiered, "scrub", "--api-key", "one")
    assert gone.output == f"{n} blocks are gone from the tiers\n"
    assert blocks(tiered) == {"host": n, "disk": n}
    assert asked(tiered, "atlas-chat", "one").tiers == set()
    assert asked(tiered, "atlas-chat", "two").tiers == {"host"}
    until(lambda: blocks(tiered) == {"host": 2 * n, "disk": 2 * n})

    small = asked(tiered, "wren-mini", "two").full
    until(lambda: blocks(tiered) == {"host": 2 * n + small, "disk": 2 * n + small})
    gone = kv(tiered, "scrub", "--model", "atlas-chat")
    assert gone.output == f"{2 * n} blocks are gone from the tiers\n"
    assert blocks(tiered) == {"host": small, "disk": small}
    order(tiered, "DELETE", "models/wren-mini?patience=1")
    assert blocks(tiered) == {"host": 0, "disk": 0}


def test_sizes_change_while_it_serves(tiered: ServerProcess) -> None:
    n = asked(tiered, "atlas-chat", "two").full
    until(lambda: blocks(tiered) == {"host": n, "disk": n})
    assert kv(tiered, "resize", "--host", "0").exit_code == 0
    assert blocks(tiered) == {"host": 0, "disk": n}
    found = asked(tiered, "atlas-chat", "two")
    assert found.tiers == set(), "nothing is brought through a host tier of no size"
    assert kv(tiered, "resize", "--host", "32MiB", "--disk", "48MiB").exit_code == 0
    assert asked(tiered, "atlas-chat", "two").tiers == {"disk"}
    listed = json.loads(kv(tiered, "list", "--json").output)
    assert [t["capacity_bytes"] for t in listed["tiers"]] == [32 * MiB, 48 * MiB]
    assert "two " in kv(tiered, "list").output


def test_what_the_command_refuses(tiered: ServerProcess) -> None:
    assert kv(tiered, "scrub").exit_code == 2, "all is asked for by --all"
    assert kv(tiered, "scrub", "--all", "--model", "atlas-chat").exit_code == 2
    assert kv(tiered, "resize").exit_code == 2
    missing = kv(tiered, "scrub", "--model", "nobody")
    assert (missing.exit_code, "nobody" in missing.output) == (1, True)
