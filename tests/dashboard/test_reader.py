"""Rates of successive readings, and servers that do not tell."""

from __future__ import annotations

import asyncio

import pytest

from ballast.dashboard.reader import Rates, Reader, Unreadable, decoded
from tests.dashboard.readings import present, reading, served


def test_rates_are_differences() -> None:
    rates = Rates()
    rates.add(reading(present("a", names=[served("a", 50), served("lora", 5)])))
    assert (rates.by_name, rates.total) == ({}, None)
    later = [present("a", names=[served("a", 70), served("lora", 6)]), present("b")]
    rates.add(reading(*later, uptime=102.0))
    assert rates.by_name == {"a": 10.0, "lora": 0.5, "b": 0.0}
    assert rates.total == 10.5
    assert list(rates.totals) == [10.5]


def test_a_server_that_was_started_anew_begins_from_nothing() -> None:
    rates = Rates()
    for uptime, tokens in ((100.0, 50), (101.0, 60), (1.0, 5)):
        rates.add(reading(present("a", names=[served("a", tokens)]), uptime=uptime))
    assert rates.total is None
    rates.add(reading(present("a", names=[served("a", 9)]), uptime=2.0))
    assert rates.total == 4.0
    rates.add(reading(present("a", names=[served("a", 0)]), uptime=3.0))  # another of this name
    assert rates.total == 0.0


@pytest.mark.parametrize("document", [b"", b"<html>", b'{"version": "9"}', b"[]"])
def test_what_is_no_reading_is_said(document: bytes) -> None:
    with pytest.raises(Unreadable, match="no Ballast"):
        decoded(document)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid", "nonsense"])
def test_a_server_that_is_not_there_is_said(url: str) -> None:
    async def scenario() -> None:
        async with Reader(url, None) as reader:
            await reader.read()

    with pytest.raises(Unreadable, match="cannot be reached"):
        asyncio.run(scenario())
