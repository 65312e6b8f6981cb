"""The dashboard in a real browser: what it says and that it draws. Skipped without Chromium."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.servers import running_server

from kvtide.outcomes import Choice, Decided, Why
from kvtide.server.auth import Grant, Scope, new_token, token_digest
from kvtide.server.metrics import Metrics
from kvtide.server.pages import DASHBOARD_POLICY, RegionStatus, Sample, Status, dashboard_page, server_status
from kvtide.server.scheduler import Scheduler, SchedulerSettings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.types import Namespace, TierStats
from kvtide_lab.bench.services import wait_until

BROWSER = shutil.which("chromium")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,1100",
]
POLLS = 12
UPTIME_S = 3600.0
NAMESPACE = Namespace(bytes(range(32)))


def made_up_status(polls: int = 0) -> Status:
    """Return a busy server's status, `polls` times two seconds later."""
    metrics, settings = Metrics(CollectorRegistry()), SchedulerSettings(slots=8, weights={"search": 2.0})
    scheduler = Scheduler(settings, random.Random(0))
    for number, tenant in enumerate(("search", "chat", "agents", "<b>eval</b>")):
        metrics.count_sent(tenant, (polls + 1) * (400 << 20) // (number + 1))
        metrics.count_received(tenant, (polls + 1) * (60 << 20) // (number + 1))
        metrics.count_wait(tenant, 0.004 * (number + 1))
        for connection in range(4):
            scheduler.enqueue(tenant, f"{tenant}{connection}", 3 << 20, 0.0)
    scheduler.grant(0.0)
    counts = {
        Decided(Choice.LOAD, Why.IN_TIME): 300 + 70 * polls,
        Decided(Choice.RECOMPUTE, Why.ABSENT): 90 + 30 * polls + (polls * 7919) % 23,
        Decided(Choice.ABANDONED, Why.DEADLINE): 10,
    }
    metrics.count_decisions("search", NAMESPACE, counts)
    metrics.connection_opened()
    tiers = [
        TierStats("memory", 120, 700 << 20, 1 << 30, 200, 200, 31, 0),
        TierStats("disk", 4000, 3 << 30, 16 << 30, 100, 100, 0, 2),
    ]
    metrics.note_model("search", NAMESPACE, "<i>tiny</i> float16")
    region = RegionStatus(False, 2.5, 17, 400, 3 << 30, 1)
    status = server_status(metrics, tiers, scheduler, UPTIME_S + 2 * polls, region)
    return msgspec.structs.replace(status, version="1.2.3")


def made_up_history() -> list[Sample]:
    """Return the hour before: busy for half an hour, with evictions in its last minutes, then quiet."""
    history, now = list[Sample](), Sample.of(made_up_status())
    for second in range(0, int(UPTIME_S), 5):
        busy = min(1.0, second / 1800)
        late = max(0.0, min(1.0, (second - 1500) / 300))
        counts = (int(busy * now.loaded_tokens), {"absent": int(late * 90)}, int(busy * now.sent_bytes))
        history.append(Sample(second, *counts, int(busy * now.received_bytes), int(late * now.evictions), 0))
    return history


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/":
            self.answer(dashboard_page(), "text/html; charset=utf-8")
        elif self.path == "/v1/history" and self.server.polls is not None:  # type: ignore[attr-defined]
            self.answer(msgspec.json.encode({"samples": self.server.history}), "application/json")  # type: ignore[attr-defined]
        elif self.path == "/v1/status" and self.server.polls is not None:  # type: ignore[attr-defined]
            self.answer(msgspec.json.encode(made_up_status(self.server.polls)), "application/json")  # type: ignore[attr-defined]
            self.server.polls += 1  # type: ignore[attr-defined]
        else:
            self.send_error(403)

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", DASHBOARD_POLICY)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as serving:
        serving.polls, serving.history = 0, []  # type: ignore[attr-defined]
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def browse(server: ThreadingHTTPServer, profile: Path, *flags: str) -> str:
    return browse_at(f"http://127.0.0.1:{server.server_address[1]}/", profile, *flags)


def browse_at(address: str, profile: Path, *flags: str) -> str:
    assert BROWSER is not None
    # Time in the page runs as fast as the page lets it: so many polls of two seconds.
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", f"--virtual-time-budget={POLLS * 2000}", *flags]
    return subprocess.run([*command, address], capture_output=True, text=True, check=True, timeout=120).stdout


def text_of(page: str) -> str:
    body = re.sub(r"<script>.*?</script>", "", page.partition("<body>")[2], flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def shown_of(page: str) -> str:
    """Return the page's text without what is hidden."""
    return text_of(re.sub(r"<section[^>]* hidden[^>]*>.*?</section>", "", page, flags=re.DOTALL)).replace("&quot;", '"')


@needs_browser
def test_page_shows_what_the_server_says(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    page = browse(server, tmp_path, "--dump-dom")
    text = text_of(page)
    for shown in (
        "live",
        "cache server 1.2.3, up 60 min, 1 connections",
        "memory 700 MiB of 1.0 GiB",
        "120 objects, 50.0 % hits, 31 evicted",
        "0 evicted, 2 faults",
        "8 of 8 slots, policy vtc; 8 bodies wait, 48.0 MiB to send",
        " deadline ",
        "000102030405 &lt;i&gt;tiny&lt;/i&gt; float16 search",
        "This region knows all that the centre wrote until 2.5 s ago; 17 objects wait for it",
        "search 2 48.0 %",
    ):
        assert shown in text, (shown, text)
    # 400 MiB for the first tenant and its parts for the others, every two seconds.
    assert re.search(r"Sent 417 MiB/s", text)
    assert re.search(r"Hit rate \d\d\.\d % \d+ of \d+ tokens in the last", text)
    assert "&lt;b&gt;eval&lt;/b&gt;" in page
    assert page.count("<polyline") == 4
    assert "Nobody has asked yet" not in shown_of(page)
    assert 'aria-valuetext="68.4 %"' in page
    assert 'aria-label="8 of 8 send slots in use"' in page


@needs_browser
def test_page_shows_the_hour_before_it_was_opened(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    server.history = made_up_history()  # type: ignore[attr-defined]
    page = browse(server, tmp_path, "--dump-dom")
    line = re.findall(r'<polyline[^>]*points="([^"]*)"', page)
    # Ten minutes of samples every 5 s beside the polls.
    assert max(each.count(" ") for each in line) > 110


@needs_browser
def test_empty_server_says_how_to_connect(tmp_path: Path) -> None:
    with running_server() as serving:
        page = browse_at(f"{serving.url}/", tmp_path, "--dump-dom", "--timeout=4000")
    text = shown_of(page)
    assert f'attach(model, "{serving.url}")' in text
    assert "no client has told of tokens yet" in text
    assert 'id="region-card" class="card half" aria-labelledby="region-title" hidden=""' in page


def test_server_keeps_its_history() -> None:
    with running_server() as serving:

        def samples() -> list[dict[str, Any]]:
            with urlopen(f"{serving.url}/v1/history") as answer:
                return list(json.loads(answer.read())["samples"])

        wait_until(lambda: len(samples()) > 0 and samples()[0]["missed_tokens"] == {}, "a sample")


@needs_browser
def test_page_says_that_it_needs_a_token(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    server.polls = None  # type: ignore[attr-defined]
    assert "needs a token with the scope admin" in text_of(browse(server, tmp_path, "--dump-dom"))


@needs_browser
def test_real_server_is_shown_to_whoever_has_the_token(tmp_path: Path) -> None:
    token = new_token()
    grant = Grant(tenant="search", scopes=list(Scope), token_sha256=token_digest(token))
    told = "load:in_time=512,recompute:absent=256"
    with running_server(grants=(grant,)) as serving:
        connection = HTTPConnection(serving.address.host, serving.address.port, timeout=20)
        for method, number in (("PUT", 1), ("GET", 1), ("GET", 1), ("GET", 2)):
            path = f"/v1/{object_id(number).namespace.hex()}/{object_id(number).key.hex()}"
            body = object_bytes(number, 300_000) if method == "PUT" else None
            connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
            connection.getresponse().read()
        connection.request("GET", "/v1", headers={"Authorization": f"Bearer {token}", "Kvtide-Decisions": told})
        connection.getresponse().read()
        connection.close()
        page = browse_at(f"http://admin:{token}@{serving.address}/", tmp_path, "--dump-dom", "--timeout=4000")
    text = text_of(page)
    for shown in ("live", "66.7 % 512 of 768 tokens", "memory 293 KiB of 1.0 GiB 1 object,", "search 1", "586 KiB"):
        assert shown in text, (shown, text)


def test_page_takes_nothing_from_elsewhere() -> None:
    page = dashboard_page().decode()
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in page


def luminance(color: str) -> float:
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_has_contrast_in_light_and_dark() -> None:
    # WCAG 2: 4.5 to 1 for text, 3 to 1 for bars and curves.
    blocks = re.findall(r":root \{(.*?)\}", dashboard_page().decode(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colors = dict(re.findall(r"--(\w+): (#\w{6});", block))
        for name, least in [(name, 4.5) for name in ("text", "soft", "good", "warn", "bad")] + [
            (name, 3.0) for name in ("accent", *(f"c{number}" for number in range(8)))
        ]:
            for behind in ("card", "page"):
                light, dark = sorted((luminance(colors[name]), luminance(colors[behind])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= least, (name, behind)


def test_status_sums_up_what_shares_a_label() -> None:
    metrics = Metrics(CollectorRegistry(), tenants_max=1)
    scheduler = Scheduler(SchedulerSettings(slots=1), random.Random(0))
    for tenant in ("a", "b", "c"):
        metrics.count_sent(tenant, 10)
        scheduler.enqueue(tenant, tenant, 100, 0.0)
    scheduler.grant(0.0)
    status = msgspec.json.decode(msgspec.json.encode(server_status(metrics, [], scheduler, 1.0)), type=Status)
    assert [(each.tenant, each.sent_bytes, each.waiting_sends, each.unsent_bytes) for each in status.tenants] == [
        ("a", 10, 0, 100),
        ("(others)", 20, 2, 200),
    ]
    assert status.sent_bytes == 30
