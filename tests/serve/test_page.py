"""The page at `/` in a real browser, on the real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import requests
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser import chromium, violations
from tests.serve.conftest import Server

ANSWER_MS = 120_000
# A fast stream on a busy machine has a status for a moment only, so all of them are recorded.
RECORD_STATUSES = """
window.statuses = [];
document.addEventListener("DOMContentLoaded", () => new MutationObserver((found) => {
  for (const { addedNodes } of found) for (const node of addedNodes) window.statuses.push(node.textContent);
}).observe(document.getElementById("status"), { childList: true }));
"""
TAKE_STATUS = """(pattern) => {
  const at = window.statuses.findIndex((text) => new RegExp(pattern).test(text));
  return at >= 0 && Boolean(window.statuses.splice(0, at + 1));
}"""
SCRIPT = re.compile(r"(text|application)/javascript")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Opened:
    """The page in a fresh browser profile, and what it said and asked for."""

    def __init__(self, browser: Browser, server: Server, width: int = 1280, dark: bool = False) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.add_init_script(RECORD_STATUSES)
        self.page.goto(f"{server.url}/")
        expect(self.page.locator("#model")).to_contain_text("demo · context of 16,384 tokens")

    def paste(self, text: str) -> None:
        """Paste the text as the clipboard does it."""
        self.page.get_by_label("Document", exact=True).evaluate(
            """(field, text) => {
                const clipboardData = new DataTransfer();
                clipboardData.setData("text/plain", text);
                const pasted = new ClipboardEvent("paste", {clipboardData, bubbles: true, cancelable: true});
                if (field.dispatchEvent(pasted)) field.setRangeText(text);  // nobody else inserted it
            }""",
            text,
        )

    def ask(self, text: str, max_tokens: int) -> None:
        self.paste(text)
        self.page.get_by_label("Max tokens").fill(str(max_tokens))
        self.page.get_by_role("button", name="Start").click()

    def status(self, starts: str) -> None:
        """Wait until a status begins with `starts`, after the statuses that were waited for before. The page may show a
        later one by now.
        """
        until = time.monotonic() + ANSWER_MS / 1000
        while not self.page.evaluate(TAKE_STATUS, f"^{starts}"):
            assert time.monotonic() < until, self.page.get_by_role("status").text_content()
            self.page.wait_for_timeout(50)

    def tokens(self, run: int) -> list[tuple[str, str]]:
        """The text and the tier of each token of an answer."""
        script = "(spans) => spans.map((span) => [span.textContent, span.dataset.tier])"
        spans = self.page.locator(".run").nth(run).locator(".text .token")
        return [(text, tier) for text, tier in spans.evaluate_all(script)]


def test_both_answers_are_streamed_and_equal_and_each_tier_has_its_look(
    browser: Browser, server: Server, source: str
) -> None:
    opened = Opened(browser, server)
    opened.ask(source, 96)
    expect(opened.page.locator("#size")).to_have_text("30,000 characters")
    opened.status("The answer streams")
    opened.status("Done: 96 tokens")
    opened.page.get_by_role("button", name="Same request without speculation").click()
    expect(opened.page.locator("#verdict-title")).to_contain_text(
        re.compile(r"^Same text: all 96 tokens are equal, [\d.]+× the speed$"), timeout=ANSWER_MS
    )

    drafted, plain = opened.tokens(0), opened.tokens(1)
    assert len(drafted) == 96
    assert [text for text, _ in drafted] == [text for text, _ in plain]
    assert {tier for _, tier in plain} == {"target"}
    assert len({tier for _, tier in drafted}) > 1
    asked = {"prompt": source, "max_tokens": 96, "temperature": 0.7, "seed": 1}
    assert "".join(text for text, _ in plain) == server.complete(**asked).json()["choices"][0]["text"]

    script = "(node) => { const {backgroundColor: a, textDecorationStyle: b} = getComputedStyle(node); return [a, b] }"
    legend = opened.page.locator("#legend .token")
    looks = {each.get_attribute("data-tier"): each.evaluate(script) for each in legend.all()}
    assert looks.keys() == {"draft", "lookup", "retrieval", "target"}
    assert len({colour for colour, _ in looks.values()}) == len({line for _, line in looks.values()}) == 4
    for tier in {tier for _, tier in drafted}:
        assert opened.page.locator(f".text .token[data-tier={tier}]").first.evaluate(script) == looks[tier]

    figures = opened.page.locator(".run").first
    for name, form in {
        "rate": r"\d+\.\d|–",  # on a busy machine a whole answer may come at once
        "first": r"\d+\.\d\d s",
        "total": r"\d+\.\d\d s",
        "tokens": "96",
        "acceptance": r".*\b\d+%.*",
        "plan": ".+ ahead|no drafts",
        "context": r"\d,\d{3} read \+ 96 written of 16,384",
    }.items():
        expect(figures.locator(f"[data-figure={name}]")).to_have_text(re.compile(f"^({form})$"))

    assert violations(opened.page) == []
    assert opened.said == []
    assert {urlsplit(url).netloc for url in opened.asked} == {urlsplit(server.url).netloc}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_and_shuts_nobody_out(browser: Browser, server: Server, dark: bool) -> None:
    opened = Opened(browser, server, width=360, dark=dark)
    opened.ask("def fibonacci(n):\n" + 300 * "x", 24)
    opened.status("Done: 24 tokens")
    opened.page.get_by_role("button", name="Same request without speculation").click()
    opened.page.wait_for_selector("#verdict:not([hidden])", timeout=ANSWER_MS)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360
    assert violations(opened.page) == []
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 384) == dark


def test_all_of_it_works_by_keyboard_and_escape_stops(browser: Browser, server: Server) -> None:
    opened = Opened(browser, server)
    page = opened.page
    names = []
    for _ in range(10):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"{names[-1]} does not show that it has the focus"
    fields = ["document", "continuation", "max-tokens", "temperature", "seed"]
    assert names == ["A", "open", "demo", *fields, "start", "plain"]
    page.get_by_label("Max tokens").fill("15000")
    page.get_by_label("Question").fill("def fibonacci(n):")
    page.keyboard.press("Control+Enter")
    opened.status("The answer streams")
    expect(page.get_by_role("button", name="Stop (Esc)")).to_be_visible()
    page.keyboard.press("Escape")
    opened.status(r"Stopped after \d+ tokens")
    expect(page.get_by_role("button", name="Start")).to_be_visible()
    server.wait_idle()
    assert opened.said == []


def test_a_file_and_the_demo_document_become_the_document(browser: Browser, server: Server) -> None:
    opened = Opened(browser, server)
    document = opened.page.get_by_label("Document", exact=True)
    chosen = opened.page.locator("#file")
    chosen.set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": "Ünï".encode()})
    expect(document).to_have_value("Ünï")
    chosen.set_input_files({"name": "picture.bin", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"})
    expect(opened.page.get_by_role("alert")).to_have_text("picture.bin is not a text file in UTF-8.")
    expect(document).to_have_value("Ünï")
    opened.page.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["dropped"], "dropped.txt"));
            const drop = new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true});
            document.getElementById("document").dispatchEvent(drop);
        }"""
    )
    expect(document).to_have_value("dropped")
    opened.page.get_by_role("button", name="Demo document").click()
    expect(document).to_have_value(re.compile('^"""Get useful information from live Python objects'))
    opened.page.get_by_label("Max tokens").fill("8")
    opened.page.get_by_role("button", name="Start").click()
    opened.status("Done: 8 tokens")
    assert int(opened.page.locator("[data-figure=context]").inner_text().split()[0].replace(",", "")) > 4_000


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {}, "The server does not accept the API key any more."),
        (413, {}, "The text is too long for this server. So it is."),
        (429, {"retry-after": "7"}, "The server is busy; try again in 7 s. So it is."),
        (503, {}, "The server cannot answer right now. So it is."),
        (None, {}, "The server cannot be reached."),
    ],
)
def test_errors_are_told_in_words(
    browser: Browser, server: Server, status: int | None, headers: dict[str, str], words: str
) -> None:
    opened = Opened(browser, server)

    def refuse(route: Route) -> None:
        if status is None:
            route.abort("connectionrefused")
        else:
            route.fulfill(status=status, headers=headers, json={"error": {"message": "So it is."}})

    opened.page.route("**/v1/completions", refuse)
    opened.ask("def", 4)
    expect(opened.page.get_by_role("alert")).to_have_text(re.compile(f"^{re.escape(words)}"))
    assert violations(opened.page) == []


def test_what_the_server_itself_refuses_is_told_with_its_reason(browser: Browser, server: Server) -> None:
    opened = Opened(browser, server)
    opened.ask("x = 1\n" * 20_000, 4)
    expect(opened.page.get_by_role("alert")).to_contain_text("The text is too long for this server.", timeout=ANSWER_MS)
    expect(opened.page.get_by_role("alert")).to_contain_text("16384")


def test_a_request_has_the_fields_of_the_form_and_nothing_is_stored(browser: Browser, server: Server) -> None:
    opened = Opened(browser, server)
    with opened.page.expect_request("**/v1/completions") as sent:
        opened.ask("def", 4)
    body = json.loads(sent.value.post_data or "")
    fields = {"prompt": "def", "max_tokens": 4, "temperature": 0.7, "seed": 1}
    assert body == {**fields, "stream": True, "return_token_ids": True}
    opened.status("Done: 4 tokens")
    assert opened.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", re.compile("text/html")),
        ("/page/style.css", re.compile("text/css")),
        ("/page/app.js", SCRIPT),
        ("/page/api.js", SCRIPT),
        ("/page/run.js", SCRIPT),
        ("/page/icon.svg", re.compile(r"image/svg\+xml")),
        ("/page/demo.py", re.compile("text/x-python")),
    ],
)
def test_its_files_have_their_types_and_a_strict_policy(server: Server, path: str, kind: re.Pattern[str]) -> None:
    answer = requests.get(server.url + path, timeout=10)
    assert answer.status_code == 200
    assert kind.match(answer.headers["content-type"])
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = requests.get(server.url + path, headers={"if-none-match": answer.headers["etag"]}, timeout=10)
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/../page.py", "/page/%2e%2e/page.py", "/page/none.js", "/none"])
def test_nothing_else_is_served_and_errors_keep_their_form(server: Server, path: str) -> None:
    answer = requests.get(server.url + path, timeout=10)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
