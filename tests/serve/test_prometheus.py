"""Prometheus itself, of Debian's package, as a client of /metrics: it has no complaint, scrapes a real server, and
answers for each metric and for each question of docs/metrics.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.packages import REPOSITORY
from tests.serve.conftest import Server, free_ports

pytestmark = pytest.mark.slow  # downloads 20 MB

START_S = 60.0


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `prometheus` and `promtool`, which are unpacked but not installed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("Prometheus is taken from Debian's archive, and apt-get or dpkg is not here")
    folder = tmp_path_factory.mktemp("prometheus")
    got = subprocess.run(
        ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if got.returncode or not packages:
        pytest.skip(f"Debian's archive gives no prometheus here: {got.stderr.strip()[-300:]}")
    subprocess.run(["dpkg", "-x", str(packages[0]), str(folder)], check=True, timeout=60)
    return folder / "usr" / "bin"


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """What a scrape says after a request that all tiers served, and one that was refused."""
    fields = {"max_tokens": 40, "ignore_eos": True, "speculation": {"lookaheads": [6, 2]}}
    assert server.complete(**fields).status_code == 200
    assert server.complete(max_tokens=0).status_code == 400
    server.wait_idle()
    time.sleep(1.1)  # the tiers are asked once a second
    return requests.get(f"{server.url}/metrics", timeout=10).text


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def asked(self, query: str) -> Any:
        """The result of a query; fails if Prometheus does not understand it."""
        answer = requests.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]["result"]

    def wait(self, query: str) -> Any:
        until = time.monotonic() + START_S
        while True:
            try:
                if found := self.asked(query):
                    return found
            except requests.ConnectionError:
                pass  # it starts
            assert time.monotonic() < until, f"no answer to {query}"
            time.sleep(0.3)


@pytest.fixture(scope="module")
def prometheus(
    programs: Path, server: Server, text: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder, [port] = tmp_path_factory.mktemp("scraping"), free_ports(1)
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f'scrape_configs: [{{job_name: triforce, static_configs: [{{targets: ["127.0.0.1:{server.port}"]}}]}}]\n'
    )
    command = [
        programs / "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        running = Prometheus(port)
        running.wait('up{job="triforce"} == 1')
        yield running
    finally:
        process.terminate()
        process.wait(30)


def test_promtool_has_no_complaint(programs: Path, text: str) -> None:
    found = subprocess.run(
        [programs / "promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    broken = text.replace(
        "# TYPE triforce_places gauge", "# TYPE triforce_places counter"
    )  # whose names end with _total
    assert broken != text
    check = [programs / "promtool", "check", "metrics"]
    assert subprocess.run(check, input=broken, capture_output=True, text=True, timeout=60, check=False).returncode


def test_each_metric_is_scraped_with_its_value(prometheus: Prometheus, server: Server, text: str) -> None:
    families = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert len(families) > 25
    assert "triforce_kv_cache_usage_ratio" in families
    with_samples = {re.match(r"\w+", line)[0] for line in text.splitlines() if line[:1] not in ("", "#")}  # type: ignore[index]
    asked = 0
    for name, kind in families.items():
        series = f"{name}_count" if kind == "histogram" else name
        if series in with_samples:
            found = prometheus.wait(series)
            assert all(each["metric"]["model_name"] == "demo" for each in found), found
            asked += 1
    assert asked > 25
    [tokens] = prometheus.asked("triforce_generation_tokens_total")
    assert float(tokens["value"][1]) >= 40
    shares = prometheus.asked("triforce_kv_cache_usage_ratio")
    assert shares
    assert all(0 <= float(each["value"][1]) <= 1 for each in shares)


def test_the_questions_and_alerts_of_the_documentation_are_understood(prometheus: Prometheus) -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    tables = page.partition("## Questions and their PromQL")[2].partition("## Every metric")[0]
    queries = [each.replace("\\|", "|") for each in re.findall(r"`([^`]*triforce_[^`]*)`", tables)]
    assert len(queries) > 15
    for query in queries:
        if "." not in query.partition("{")[0]:  # `triforce.acceptance` is a field of answers
            prometheus.asked(query)
    assert prometheus.asked('sum by (tier) (triforce_tier_passes_total{tier="draft"})')
