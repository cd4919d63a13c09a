"""A real Prometheus scrapes a real server: every panel has a value and every rule is evaluated."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable

import httpx
import pytest
import yaml

from tests.deploy.files import PROMETHEUS, alerts, panels
from tests.deploy.promql import filled_in
from tests.deploy.served import plain_server
from tests.helpers.server import free_port
from tests.helpers.socket_client import socket_client, start_message
from tests.helpers.videos import BODY, SYNC

__all__ = ["plain_server"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian has it)"
    ),
    pytest.mark.timing,
]


def wait(condition: Callable[[], bool], what: str, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.2)


class Prometheus:
    """The HTTP interface of a running one."""

    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)

    def ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def values(self, expression: str) -> list[float]:
        answer = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        return [float(sample["value"][1]) for sample in answer["data"]["result"]]

    def rules(self) -> list[dict]:
        groups = self.http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


async def walk(url: str) -> None:
    """A live world of three chunks."""
    async with socket_client(url) as client:
        await client.say(start_message())
        await client.rest()


@pytest.fixture(scope="module")
def prometheus(plain_server, tmp_path_factory):
    """One with the shipped settings, but for the address and a scrape every half second."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{plain_server.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )
    client = Prometheus(port)
    try:
        wait(client.ready, "Prometheus")
        wait(lambda: client.values("count_over_time(up[1m])") >= [2], "two scrapes")
        url = f"{plain_server.address}{SYNC}"
        assert httpx.post(url, json=BODY, timeout=60).status_code == httpx.codes.OK
        # A rate is of two scrapes of a series, and that of live worlds may begin with this one.
        asyncio.run(walk(plain_server.url))
        intervals = "vllm_omni:chunk_interval_s_count"
        wait(lambda: bool(client.values(intervals)), "a live world in a scrape")
        asyncio.run(walk(plain_server.url))
        wait(lambda: client.values(f"increase({intervals}[1m])") > [0], "another one")
        ended = 'vllm_omni:requests_success_total{finished_reason="finished"}'
        wait(lambda: client.values(f"increase({ended}[1m])") > [1], "both worlds in a scrape")
        yield client
    finally:
        client.http.close()
        process.terminate()
        process.wait(30)


def test_every_panel_has_a_value(prometheus):
    empty = [
        (panel["title"], target["expr"])
        for panel in panels()
        for target in panel["targets"]
        if not any(value == value for value in prometheus.values(filled_in(target["expr"])))
    ]
    assert empty == []


def test_every_rule_is_evaluated_and_silent_on_a_healthy_server(prometheus):
    wait(lambda: all(rule["lastEvaluation"] for rule in prometheus.rules()), "the rules")
    wait(lambda: {rule["health"] for rule in prometheus.rules()} == {"ok"}, "sound rules")
    assert [rule["name"] for rule in prometheus.rules()] == [alert["alert"] for alert in alerts()]
    assert [rule["name"] for rule in prometheus.rules() if rule["state"] == "firing"] == []
