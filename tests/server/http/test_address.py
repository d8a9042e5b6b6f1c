"""Who can reach a server, and that strangers are let in on purpose only."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ballast.cli import app
from ballast.cluster import logs
from ballast.cluster.hosts.hosted_workers import fleet_id
from ballast.core.errors import ConfigError
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server import serve
from ballast.server.http.address import check_closed, is_loopback

OPEN = ServerSettings(admin_key="sk-admin-of-the-tests")
CLOSED = ServerSettings(keys=(KeySettings(name="a", key="sk-a-of-the-tests"),))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
    ],
)
def test_an_address_that_others_reach_wants_keys(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    check_closed(host, CLOSED)
    if expected:
        check_closed(host, OPEN)
    else:
        with pytest.raises(ConfigError, match="BALLAST_API_KEY"):
            check_closed(host, OPEN)


def test_hosts_that_answer_want_keys() -> None:
    check_closed("::1", CLOSED, 8080)
    with pytest.raises(ConfigError, match=r"hosts\.http.*BALLAST_API_KEY"):
        check_closed("::1", OPEN, 8080)


@pytest.mark.parametrize(
    ("options", "environment", "served"),
    [
        ([], {}, False),
        (["--without-keys"], {}, True),
        (["--api-key", "sk-x-of-the-tests"], {}, True),
        ([], {"BALLAST_API_KEY": "sk-x-of-the-tests"}, True),
        (["--api-key", "sk-short"], {}, False),
        ([], {"BALLAST_API_KEY": "sk-short"}, False),
        ([], {"BALLAST_WITHOUT_KEYS": "1"}, True),
    ],
)
def test_serve_on_all_addresses(
    fleet_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environment: dict[str, str],
    served: bool,
) -> None:
    """As the image does. The check is made whenever the fleet is read, at SIGHUP as well."""
    readings: list[object] = []

    def run(source: serve.FleetSource, *_: object, **__: object) -> int:
        readings.append(source.read())
        return 0

    monkeypatch.setattr(serve, "serve", run)
    monkeypatch.setattr(logs, "set_up_logs", lambda *_: None)
    ended = CliRunner().invoke(
        app, ["serve", str(fleet_file), "--host", "0.0.0.0", *options], env=environment
    )
    assert len(readings) == served
    assert isinstance(ended.exception, SystemExit | None) == served
    assert isinstance(ended.exception, ConfigError) != served


def test_hosts_answer_for_a_ray_cluster_alone(
    fleet_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters: list[object] = []

    def run(*_: object, ray: object, **__: object) -> int:
        clusters.append(ray)
        return 0

    monkeypatch.setattr(serve, "serve", run)
    monkeypatch.setattr(logs, "set_up_logs", lambda *_: None)
    command = ["serve", str(fleet_file), "--api-key", "sk-x-of-the-tests", "--hosts-http", "8080"]
    ended = CliRunner().invoke(app, command)
    assert isinstance(ended.exception, ConfigError)
    assert "hosts.http" in str(ended.exception)
    CliRunner().invoke(app, [*command, "--ray", "10.0.0.1:6379"])
    (ray,) = clusters
    assert isinstance(ray, serve.RayHosts)
    assert (ray.address, ray.http, ray.fleet) == ("10.0.0.1:6379", 8080, fleet_id(fleet_file))


def test_keys_stay_wanted_where_hosts_answer_until_a_restart(
    fleet_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file says of `hosts` counts at a restart, what it says of keys when it is read."""
    text = fleet_file.read_text().replace("path: ", f"path: {fleet_file.parent}/")
    closed = "\nserver: {keys: [{name: k, key: sk-k-of-the-tests}]}\n"
    file = tmp_path / "fleet.yaml"
    file.write_text(f'{text}{closed}hosts: {{ray: "10.0.0.1:6379", http: 8080}}\n')
    reread: list[str] = []

    def run(source: serve.FleetSource, *_: object, **__: object) -> int:
        file.write_text(text + closed)
        source.read()
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"hosts\.http.*BALLAST_API_KEY") as refused:
            source.read()
        reread.append(str(refused.value))
        return 0

    monkeypatch.setattr(serve, "serve", run)
    monkeypatch.setattr(logs, "set_up_logs", lambda *_: None)
    ended = CliRunner().invoke(app, ["serve", str(file)])
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    assert len(reread) == 1
