"""The HTTP door through the official client, and what it adds to OpenAI's API."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import psutil
import pytest
import requests
from openai import NotFoundError, OpenAI
from openai.types import CompletionUsage

from tests.serve.conftest import Server
from triforce_core.models.files import load_tokenizer


def chunks_of(response: requests.Response) -> list[dict[str, Any]]:
    """The events of a stream; the last must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.iter_lines(decode_unicode=True) if line.startswith("data: ")]
    events = [line.removeprefix("data: ") for line in lines]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def counts(usage: CompletionUsage) -> dict[str, Any]:
    """The token counts of a usage, without where the KV came from."""
    return usage.model_dump(exclude={"prompt_tokens_details"})


def test_a_long_document_is_continued_the_same_streamed_and_whole(openai: OpenAI, server: Server, source: str) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": source, "max_tokens": 48, "temperature": 0.7, "seed": 1}
    whole = openai.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 7_500
    assert whole.usage.completion_tokens == 48
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 48
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].text) > 48

    chunks = list(openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1].usage is not None
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    fingerprints = {chunk.system_fingerprint for chunk in chunks} | {whole.system_fingerprint}
    assert fingerprints == {tier["fingerprint"] for tier in server.status()["tiers"] if tier["tier"] == "target"}


def test_a_document_that_was_read_is_not_read_again(openai: OpenAI, source: str) -> None:
    """This holds for requests of one salt. `prompt_tokens_details` tells it to the official client."""
    questions = [f"{source[:12_000]}\n# {question}\n" for question in ("What is it?", "Who calls it?")]

    def asked(prompt: str, salt: str) -> tuple[str, int, int]:
        fields: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        fields |= {"extra_body": {"cache_salt": salt}}
        whole = openai.completions.create(**fields)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        cached = whole.usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        return whole.choices[0].text, cached, whole.usage.prompt_tokens

    first, second = asked(questions[0], "ours"), asked(questions[1], "ours")
    assert first[1] == 0
    assert 0.9 * second[2] < second[1] < second[2]
    again, strange = asked(questions[0], "ours"), asked(questions[0], "theirs")
    assert again[1] > first[2] * 0.9
    assert strange[1] == 0
    assert first[0] == again[0] == strange[0]


def test_a_conversation_goes_on_where_it_was(openai: OpenAI, source: str) -> None:
    messages: Any = [{"role": "user", "content": source[:6000]}]
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 16, "temperature": 0, "stream": True}
    fields |= {"stream_options": {"include_usage": True}, "extra_body": {"cache_salt": "chat"}}
    found = []
    for _ in range(2):
        chunks = list(openai.chat.completions.create(messages=messages, **fields))
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    assert found[0][0] == 0
    assert found[1][0] > 0.9 * found[0][1], "all of the first turn's prompt but its end"


def test_models_are_listed_and_found(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == ["demo"]
    assert openai.models.retrieve("demo").id == "demo"
    with pytest.raises(NotFoundError, match="is not served here"):
        openai.models.retrieve("other/model")


def test_the_seed_is_told_and_gives_the_same_again(server: Server) -> None:
    first = server.complete(max_tokens=24).json()
    again = server.complete(max_tokens=24, seed=first["triforce"]["seed"]).json()
    other = server.complete(max_tokens=24).json()
    assert again["choices"] == first["choices"]
    assert other["triforce"]["seed"] != first["triforce"]["seed"]
    assert other["choices"] != first["choices"]


def test_an_unset_maximum_is_openai_s(server: Server) -> None:
    assert server.complete(temperature=0).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "speculation",
    [
        {"tiers": "target"},
        {"tiers": "retrieval,target"},
        {"lookaheads": [0, 4]},
        {"lookaheads": [16, 1]},
        {"tiers": "retrieval,target", "lookaheads": [5, 5]},
    ],
    ids=str,
)
def test_speculation_changes_who_proposes_and_never_what_comes_out(server: Server, speculation: dict[str, Any]) -> None:
    asked = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "return_token_ids": True}
    default, chosen = (
        server.complete(**asked, speculation=each).json() for each in ({"lookaheads": [8, 3]}, speculation)
    )
    assert chosen["choices"][0]["token_ids"] == default["choices"][0]["token_ids"]
    assert chosen["choices"][0]["text"] == default["choices"][0]["text"]
    assert set(default["choices"][0]["origins"]) == {"draft", "retrieval", "target"}
    lookaheads = speculation.get("lookaheads", [1, 1])
    if speculation.get("tiers") == "target":
        assert set(chosen["choices"][0]["origins"]) == {"target"}
        assert chosen["triforce"]["tokens_per_round"] == 1
        assert chosen["triforce"]["acceptance"] == {"retrieval": None, "draft": None}
    elif "tiers" in speculation:
        assert set(chosen["choices"][0]["origins"]) == {"retrieval", "target"}
        assert chosen["triforce"]["acceptance"]["draft"] is None
    elif not lookaheads[0]:
        assert set(chosen["choices"][0]["origins"]) == {"draft", "target"}
    assert default["triforce"]["tokens_per_round"] > 2


def test_a_request_may_name_the_drafter_alone(server: Server) -> None:
    asked = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "return_token_ids": True}
    default, by_lookup = (
        server.complete("[1, 2, 3], [1, 2, 3], [1, 2,", **asked, speculation=each).json()
        for each in (None, {"drafter": "lookup"})
    )
    assert by_lookup["choices"][0]["token_ids"] == default["choices"][0]["token_ids"]
    assert [*by_lookup["triforce"]["controller"]["rounds"]] == ["retrieval+lookup"]
    assert by_lookup["triforce"]["controller"]["plan"] == "retrieval+lookup 8,3"
    assert by_lookup["triforce"]["controller"]["expected_ms_per_token"] is None
    assert "draft" not in by_lookup["choices"][0]["origins"]


def test_the_controller_says_what_it_planned(server: Server) -> None:
    controller = server.complete(max_tokens=60, temperature=0).json()["triforce"]["controller"]
    assert sum(controller["rounds"].values()) > 0
    assert controller["plain_ms_per_token"] > 0
    [target] = [tier for tier in server.status()["tiers"] if tier["tier"] == "target"]
    assert target["controller"]["latest"]
    of_model = {"accepted", "accepted_below", "steps", "steps_below"}
    names = {"temperature", "retrieval", *of_model, "lookup_first", "lookup", "lookup_long", "found"}
    assert set(target["controller"]["acceptance"][0]) == names


def test_token_ids_and_origins_come_with_the_text_that_they_make(server: Server) -> None:
    asked = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "return_token_ids": True}
    whole = server.complete(**asked).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in chunks_of(server.stream(**asked))]
    assert len(chunks) > 2
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    for answer in (*chunks, whole):  # who proposed a token depends on timing: on when a snapshot came, for one
        assert len(answer["origins"]) == len(answer["token_ids"])
        assert set(answer["origins"]) <= {"draft", "retrieval", "target", "lookup"}
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert load_tokenizer("demo").decode(whole["token_ids"]) == whole["text"]
    assert len(whole["origins"]) == len(whole["token_ids"]) == 40
    assert "token_ids" not in server.complete(max_tokens=1).json()["choices"][0]


def test_a_prompt_may_be_text_or_tokens_alone_or_in_a_list(server: Server) -> None:
    text = "import os\n\ndef "
    tokens = load_tokenizer("demo")(text)["input_ids"]
    answers = [server.complete(p, max_tokens=8, temperature=0).json() for p in (text, tokens, [text], [tokens])]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    assert all(answer["usage"]["prompt_tokens"] == len(tokens) for answer in answers)


def test_the_output_ends_before_a_stop_string_wherever_it_falls(server: Server) -> None:
    """The stop string falls inside a run of accepted tokens, across two runs, and at the very beginning. The text and
    the tokens are cut alike.
    """
    asked = {"max_tokens": 60, "temperature": 0.9, "seed": 21, "return_token_ids": True}
    chunks = [chunk["choices"][0] for chunk in chunks_of(server.stream(**asked))]
    full = "".join(chunk["text"] for chunk in chunks)
    seam = len(chunks[0]["text"] + chunks[1]["text"])
    across, inside, early = full[seam - 2 : seam + 3], full[seam + 3 : seam + 7], full[:1]
    for stop in (across, [inside], [early], ["never there", across, inside]):
        cut = min(full.find(each) for each in ([stop] if isinstance(stop, str) else stop) if each in full)
        whole = server.complete(**asked, stop=stop).json()
        choice = whole["choices"][0]
        assert choice["text"] == full[:cut]
        assert choice["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert load_tokenizer("demo").decode(choice["token_ids"]).startswith(full[:cut])
        assert not load_tokenizer("demo").decode(choice["token_ids"][:-1]).startswith(full[:cut] or "x")
        streamed = [chunk["choices"][0] for chunk in chunks_of(server.stream(**asked, stop=stop))]
        assert "".join(each["text"] for each in streamed) == full[:cut]
        assert [token for each in streamed for token in each["token_ids"]] == choice["token_ids"]
        in_first_token = stop == [early]  # which comes before the first round
        assert (whole["triforce"]["tokens_per_round"] is None) == in_first_token


def test_the_links_carry_the_blocks_between_three_processes(server: Server) -> None:
    def counters() -> dict[str, dict[str, int]]:
        return {link["link"]: link for tier in server.status()["tiers"] for link in tier["links"]}

    before = counters()
    server.complete(max_tokens=40, temperature=0.8, seed=2, speculation={"lookaheads": [8, 3]})
    after = counters()
    assert after.keys() == {"target>retrieval", "retrieval>draft"}
    for link in after:
        for name in ("work_items", "proposals", "proposed_tokens", "bytes_in", "bytes_out"):
            assert after[link][name] > before[link][name], (link, name)
    titles = [" ".join(each.cmdline()) for each in psutil.Process(server.process.pid).children(recursive=True)]
    for actor in ("ray::DraftActor", "ray::RetrievalActor", "ray::TargetActor"):
        assert sum(title.startswith(actor) for title in titles) == 1, titles


def test_health(server: Server) -> None:
    answer = requests.get(f"{server.url}/health", timeout=10)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_the_real_server_answers_chats(openai: OpenAI, server: Server) -> None:
    """The demo pair has no template of its own: a chat is the plain text, and so the same as a completion of it."""
    asked: dict[str, Any] = {"max_completion_tokens": 24, "temperature": 0.7, "seed": 5}
    chat = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "import os"}]
    ask = partial(openai.chat.completions.create, model="demo", messages=chat)
    whole = ask(logprobs=True, top_logprobs=2, **asked)
    content = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True, **asked))
    text = "system: Write Python.\nuser: import os\nassistant:"
    same = server.complete(text, max_tokens=24, temperature=0.7, seed=5).json()
    plain = ask(**asked, extra_body={"speculation": {"tiers": "target"}})
    assert whole.choices[0].message.content == same["choices"][0]["text"]
    assert content == same["choices"][0]["text"]
    assert plain.choices[0].message.content == same["choices"][0]["text"]
    assert whole.usage.prompt_tokens == same["usage"]["prompt_tokens"]
    assert whole.choices[0].finish_reason == "length"
    assert (
        b"".join(bytes(each.bytes) for each in whole.choices[0].logprobs.content).decode() == same["choices"][0]["text"]
    )

    schema = {"name": "point", "schema": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}}}
    schema["schema"] |= {"required": ["x"], "additionalProperties": False}  # type: ignore[operator]
    guided = ask(seed=1, response_format={"type": "json_schema", "json_schema": schema})
    assert isinstance(json.loads(guided.choices[0].message.content)["x"], int)
