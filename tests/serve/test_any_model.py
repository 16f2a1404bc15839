"""`triforce serve --model`: a model that was named by nothing but its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.random_models import byte_model
from tests.serve.conftest import TRIFORCE, Server, free_ports, start, stop
from tests.starting import LocalRay, tried_twice
from triforce_core.client import TriForceClient
from triforce_core.models.files import load_tokenizer


@pytest.mark.ci
def test_a_folder_is_served_with_all_that_follows_from_it(local_ray: LocalRay, tmp_path: Path) -> None:
    local_ray.end()
    model, config, log = byte_model(tmp_path / "tiny"), tmp_path / "config.yaml", tmp_path / "log.txt"
    stated = {"do_sample": False, "repetition_penalty": 1.25}
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(stated))
    port, grpc_port = free_ports(2)
    config.write_text(f"dtype: float32\nserver: {{port: {port}, grpc_port: {grpc_port}}}\n")
    running = tried_twice(lambda: start(config, log, TRIFORCE, "--model", model))
    server = Server(port, grpc_port, running)
    try:
        prompt = "def main():\n    return main\n" * 8
        ids = torch.tensor([load_tokenizer(model)(prompt)["input_ids"]])
        whole = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=48, pad_token_id=0)
        theirs = whole[0, ids.shape[1] :].tolist()

        answer = server.complete(prompt, max_tokens=48, return_token_ids=True).json()
        assert answer["model"] == "tiny"
        assert answer["choices"][0]["token_ids"] == theirs
        plain = {"max_tokens": 48, "return_token_ids": True, "speculation": {"lookaheads": [0, 0]}}
        assert server.complete(prompt, **plain).json()["choices"][0]["token_ids"] == theirs
        with TriForceClient(server.grpc_address) as client:
            assert list(client.generate(prompt, max_tokens=48).token_ids) == theirs
        sampled = server.complete(prompt, max_tokens=48, temperature=1, seed=1, return_token_ids=True).json()
        assert sampled["choices"][0]["token_ids"] != theirs
        assert server.tiers_with_passes() == {"retrieval", "target"}  # prompt lookup runs no model
    finally:
        stop(server, log)
    said = log.read_text()
    assert (
        "serving tiny: drafter prompt lookup (draft.model names none), context 8,192 tokens (the model's own)" in said
    )
    assert "requests by default: temperature 0, repetition_penalty 1.25 (the model's generation_config.json)" in said
