"""A service over a pipeline that answers with given tokens, in blocks cut anywhere."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import cache

from deploy.service import ServedModel, Service
from tests.chat_models import ENDS, tokenizer
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings

USER = {"role": "user", "content": "How warm is it in Łódź?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "…", "parameters": PARAMETERS}}]
ARGUMENTS = '{"city": "</tool_call> Łódź"}'
CALL = {
    "qwen": f'{{"name": "weather", "arguments": {ARGUMENTS}}}',
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
}
ANSWERS = {
    "qwen": f"<think>\nI look.\n</think>\n\n<tool_call>\n{CALL['qwen']}\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{CALL['qwen']}]",
    "llama": CALL["llama"],
}


@cache
def demo() -> ServedModel:
    return ServedModel.load(load_settings())


class Answering:
    """Answers with the tokens of a text, in blocks cut at random, and ends as a model does, or by `length`."""

    def __init__(self, family: str, text: str, *, cut: int, length: bool = False) -> None:
        self.ids = tokenizer(family).encode(text, add_special_tokens=False)
        self.end = gen.FINISH_REASON_LENGTH if length else gen.FINISH_REASON_STOP
        self.random = random.Random(cut)
        self.requests: list[pb.DecodeRequest] = []

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.requests.append(request)
        left = self.ids
        stats = pb.DecodeStats(decoded=len(self.ids), decode_s=0.01, tallies=[pb.Tally(rounds=1)] * 3)
        while left:
            size = self.random.choice([1, 1, 2, 3, 7, 30, 1000])
            block, left = left[:size], left[size:]
            scores = [gen.TokenLogprobs(logprob=-0.5) for _ in block] if request.HasField("logprobs") else []
            for score, token in zip(scores, block, strict=False):
                score.top_ids.extend([token, 5])
                score.top_logprobs.extend([-0.5, -1.5])
            yield pb.DecodeEvent(token_ids=block, origins=bytes(len(block)), logprobs=scores, stats=stats)
        yield pb.DecodeEvent(finish_reason=self.end, stats=stats)

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        return {}

    async def check(self) -> None:
        """The pipeline can serve."""


def service_of(family: str, pipelines: Answering) -> Service:
    end = tokenizer(family).convert_tokens_to_ids(ENDS[family])
    return Service(load_settings(), replace(demo(), tokenizer=tokenizer(family), stop_token_ids=(end,)), pipelines)
