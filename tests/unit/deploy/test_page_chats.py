"""The page with a model that chats: in a real browser, from its files, without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from tests.browser import chromium

FOLDER = Path(__file__).parents[3] / "deploy" / "page"
PLACE = "http://page.test/"


@pytest.mark.parametrize("chats", [True, False])
def test_a_model_with_a_template_is_asked_and_another_continues(chats: bool) -> None:
    tokens = {"token_ids": [1, 2], "texts": ["Yes", "."], "origins": ["target", "lookup"], "finish_reason": "stop"}
    said = {"delta": {"content": "Yes."}} if chats else {"text": "Yes."}
    opening = [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}] if chats else []
    bodies = [json.dumps({"choices": [choice]}) for choice in (*opening, {**said, **tokens})]
    path, sent = "v1/chat/completions" if chats else "v1/completions", []

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(PLACE).removeprefix("page/") or "index.html"
        if name == "v1/models":
            route.fulfill(json={"data": [{"id": "some", "max_model_len": 8192, "chats": chats}]})
        elif name == path:
            sent.append(json.loads(route.request.post_data or ""))
            body = "".join(f"data: {each}\n\n" for each in (*bodies, "[DONE]"))
            route.fulfill(content_type="text/event-stream", body=body)
        else:
            route.fulfill(path=FOLDER / name)

    with chromium() as browser:
        page = browser.new_page()
        page.route(f"{PLACE}**", answer)
        page.goto(PLACE)
        expect(page.locator("#model")).to_contain_text("some")
        page.get_by_label("Document", exact=True).fill("A text.")
        page.get_by_label("Question or beginning of the answer").fill("Is it?")
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_role("status")).to_contain_text("Done: 2 tokens")
        shown = page.locator(".run .text .token").all_text_contents()
    assert shown == ["Yes", "."]
    asked = {key: sent[0].get(key) for key in ("messages", "prompt")}
    text = "A text.\nIs it?"
    wanted = {"messages": [{"role": "user", "content": text}] if chats else None, "prompt": None if chats else text}
    assert asked == wanted
