"""What the page says of errors that no server of ours makes: in a real browser, from its files, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser import chromium

FOLDER = Path(__file__).parents[3] / "deploy" / "page"
PLACE = "http://page.test/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Page:
    """The page in a fresh browser profile, from a server that knows its files and its model."""

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(PLACE).removeprefix("page/") or "index.html"
        if name == "v1/models":
            route.fulfill(json={"data": [{"id": "demo", "max_model_len": 16384}]})
        else:
            route.fulfill(path=FOLDER / name)

    page = browser.new_page()
    page.route(f"{PLACE}**", answer)
    page.goto(PLACE)
    expect(page.locator("#model")).to_contain_text("demo")
    return page


def ask(page: Page) -> None:
    page.get_by_label("Document", exact=True).fill("def")
    page.get_by_role("button", name="Start").click()


@pytest.mark.parametrize(
    "answer",
    [
        {"json": {"detail": "Bad Gateway"}},
        {"json": {"error": "Bad Gateway"}},
        {"body": "null"},
        {"body": "<h1>Bad Gateway</h1>"},
    ],
)
def test_a_proxy_s_error_is_told_by_its_status(page: Page, answer: dict[str, Any]) -> None:
    page.route("**/v1/completions", lambda route: route.fulfill(status=502, **answer))
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The server refuses this request (502).")


def test_a_text_that_is_too_long_is_told_by_the_error_s_code(page: Page) -> None:
    error = {"message": "So it is.", "code": "context_length_exceeded"}
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, json={"error": error}))
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The text is too long for this server. So it is.")
