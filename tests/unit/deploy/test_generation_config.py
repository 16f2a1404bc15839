"""What a model's generation_config.json asks for, in requests that do not say: through every door, and as transformers'
`generate` has it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.command_line import run
from tests.random_models import byte_model
from tests.scripted import ENDED, ask, generated, served
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core.building.fingerprint import target_fingerprint
from triforce_core.config import Settings, load_settings
from triforce_core.errors import UnknownModelError
from triforce_core.messages import UNCHANGED, SamplingParams
from triforce_core.models import generation
from triforce_core.models.files import load_tokenizer
from triforce_core.models.generation import default_sampling

pytestmark = pytest.mark.usefixtures("own_threads")

STATED = {"temperature": 0.25, "top_k": 5, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}
DEFAULTS = SamplingParams(**STATED, bad_word_ids=((7,),))


def settings_with(folder: Path, asked: Any, **given: Any) -> Settings:
    """The settings of a model whose file says `asked`; None: that has no file."""
    model = byte_model(folder)
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if asked is not None:
        file.write_text(json.dumps(asked))
    return load_settings(None, dtype="float32", target={"model": model, **given})


def test_what_is_stated_is_the_default(tmp_path: Path) -> None:
    ids = {"eos_token_id": [3, 4], "bos_token_id": 1, "max_length": 4096, "num_beams": 1}
    settings = settings_with(tmp_path, {**STATED, **ids, "do_sample": True, "suppress_tokens": [7]})
    assert default_sampling(settings) == DEFAULTS
    assert generation.line(settings) == (
        "requests by default: temperature 0.25, top_k 5, top_p 0.5, min_p 0.125, repetition_penalty 1.5, words that"
        " never occur: 1 (the model's generation_config.json)"
    )
    off = settings_with(tmp_path, STATED, generation_config="none")
    assert default_sampling(off) == UNCHANGED
    assert generation.line(off) == ""
    assert target_fingerprint(off) != target_fingerprint(settings_with(tmp_path, STATED))


def test_a_file_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert default_sampling(settings_with(tmp_path, {"do_sample": False, "top_p": 0.5})).temperature == 0


@pytest.mark.parametrize("asked", [None, {"eos_token_id": 2}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}])
def test_a_file_that_says_nothing_changes_nothing(tmp_path: Path, asked: Any) -> None:
    settings = settings_with(tmp_path, asked)
    assert default_sampling(settings) == UNCHANGED
    assert generation.line(settings) == ""


def test_what_is_not_applied_is_named(tmp_path: Path) -> None:
    asked = {"begin_suppress_tokens": [1], "forced_eos_token_id": 0, "no_repeat_ngram_size": 3, "num_beams": 1}
    line = generation.line(settings_with(tmp_path, asked))
    assert (
        line
        == "NOT applied of generation_config.json: begin_suppress_tokens, forced_eos_token_id, no_repeat_ngram_size"
    )


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "most"}, {"suppress_tokens": [*range(300)]}])
def test_values_that_no_request_may_have_are_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UnknownModelError, match=r"generation_config\.json .*target\.generation_config: none"):
        default_sampling(settings_with(tmp_path, wrong))


def test_every_door_fills_what_a_request_leaves_unset_and_nothing_else() -> None:
    client, service, pipelines = served(ENDED)
    service.model = replace(service.model, sampling=DEFAULTS)
    chat = {"messages": [{"role": "user", "content": "def"}]}

    def sent() -> SamplingParams:
        message = pipelines.requests[-1].sampling
        numbers = {name: getattr(message, name) for name in STATED}
        return SamplingParams(**numbers, bad_word_ids=tuple(tuple(word.values) for word in message.bad_word_ids))

    assert ask(client).status_code == 200
    assert sent() == DEFAULTS
    assert ask(client, temperature=None, top_k=None).status_code == 200
    assert sent() == DEFAULTS
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert sent() == DEFAULTS
    generated(service)
    assert sent() == DEFAULTS

    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # OpenAI's defaults
    excluded = SamplingParams(bad_word_ids=((7,),))  # whatever a request says
    assert ask(client, **own).status_code == 200
    assert sent() == excluded
    assert client.post("/v1/chat/completions", json=chat | own).status_code == 200
    assert sent() == excluded
    generated(service, sampling=gen.Sampling(**own))
    assert sent() == excluded

    generated(service, sampling=gen.Sampling(temperature=0, bad_word_ids=[gen.TokenIds(values=[8, 9])]))
    assert sent() == replace(DEFAULTS, temperature=0.0, bad_word_ids=((7,), (8, 9)))
    assert ask(client, top_p=0).status_code == 200
    assert sent() == replace(DEFAULTS, temperature=0.0, top_p=1.0)
    for path in ("/v1/completions", "/v1/chat/completions"):  # -1 is no default: it keeps all tokens
        body = {"prompt": "def"} if path == "/v1/completions" else chat
        assert client.post(path, json=body | {"top_k": -1}).status_code == 200
        assert sent() == replace(DEFAULTS, top_k=0)


def test_without_a_file_requests_are_as_at_openai() -> None:
    client, _, pipelines = served(ENDED)
    assert ask(client).status_code == 200
    sampling = pipelines.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1, 1, 1)


def test_generate_is_as_transformers_generates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def tokens(*arguments: str) -> list[int]:
        prompt = tmp_path / "prompt"
        prompt.write_text("def fibonacci(n):")
        given = ("--prompt-file", str(prompt), "--model", model, "--dtype", "float32", "--max-tokens", "24", "--json")
        assert run(monkeypatch, "generate", *given, *arguments) == 0
        found: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
        return found

    model = str(settings_with(tmp_path, None).target.model)
    plain = tokens("--temperature", "0")
    asked = {"do_sample": False, "repetition_penalty": 1.3, "suppress_tokens": plain[:2], "bad_words_ids": [plain[3:5]]}
    settings_with(tmp_path, asked)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([load_tokenizer(model)("def fibonacci(n):")["input_ids"]])
    whole = theirs.generate(ids, max_new_tokens=24, pad_token_id=0)[0].tolist()
    assert tokens() == whole[ids.shape[1] :]
    assert tokens() != plain
    assert tokens("--seed", "5") == tokens()
