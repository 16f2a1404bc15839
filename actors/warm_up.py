"""Requests that a pipeline decodes before it serves, so that no user waits for the first pass of a kind, when memory
is touched for the first time, libraries make kernels for its shape, and numbers of CPU threads are tried.
"""

import asyncio
import logging
import math
import time
from contextlib import aclosing
from typing import NamedTuple

from actors.pipeline import Pipeline
from actors.running_target import RunningTarget
from actors.wire import request_to_proto
from triforce_core.config import Settings
from triforce_core.engine.limits import Limits
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY, SamplingParams

log = logging.getLogger("ray.serve")  # operators read this logger's files first

WARM_UP_S = 600.0  # after this time the pipeline serves without being warm; health checks then detect a hang
PATIENCE_S = 5.0  # longest prefill: prompts are shortened accordingly
SHORT_PROMPT, LONG_PROMPT = 64, 8192  # tokens
# Output tokens. With more, threads of plain decoding are found on up to 16 cores (`triforce_core.machine.threads`).
FEW, MORE = 24, 64
PERIOD = 61  # tokens after which a prompt repeats itself: so does the output, and long drafts are accepted
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
PLAIN = (0, 0)  # lookaheads without drafts


class Stage(NamedTuple):
    """The sizes of one request, before they are cut to what the machine does in time and to the context."""

    first_token: int  # of the prompt: KV of a prompt that begins unlike the earlier ones is not found
    prompt_tokens: int
    output_tokens: int
    sampling: SamplingParams
    lookaheads: tuple[int, int]


def stages(settings: Settings) -> list[Stage]:
    """Two requests with a short prompt, one with a whole prefill chunk, and two with a long context, the last decoded
    long enough for two snapshots, the second of which is sent as changes. The second and the fourth are decoded
    plainly, the third without the retrieval tier.
    """
    given = settings.speculation
    # Requests may ask for drafts even if the settings do not, unless the target is lossy.
    asked = any(given.effective) or settings.target.lossy
    whole = given.effective if asked else given.lookaheads
    return [
        Stage(1, SHORT_PROMPT, FEW, SAMPLED, whole),
        Stage(2, SHORT_PROMPT, FEW, SAMPLED, PLAIN),  # again, for the prefill rate of a warm pipeline
        Stage(3, settings.target.prefill_chunk, FEW, SAMPLED, (0, whole[1])),
        Stage(4, LONG_PROMPT, MORE if settings.chooses_threads else FEW, GREEDY, PLAIN),
        Stage(4, LONG_PROMPT, 2 * settings.retrieval.refresh_every + 1, GREEDY, whole),
    ]


def request(stage: Stage, limits: Limits, most_prompt: float) -> Request:
    """The request of a stage, with at most `most_prompt` prompt tokens."""
    room = min(limits.context_length, limits.kv_pool_tokens)
    prompt_tokens = max(1, int(min(stage.prompt_tokens, most_prompt, room // 2)))
    prompt = tuple((stage.first_token + 7919 * (i % PERIOD)) % limits.vocab_size for i in range(prompt_tokens))
    return Request(prompt, min(stage.output_tokens, room - prompt_tokens), stage.sampling, 0, stage.lookaheads)


async def warm_up(pipeline: Pipeline, settings: Settings) -> None:
    """Run passes of every kind in every tier."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(WARM_UP_S):
            limits: Limits = await pipeline.actors.target.limits.remote()
            most_prompt = math.inf
            for stage in stages(settings):
                asked, begun = request(stage, limits, most_prompt), time.monotonic()
                async with aclosing(pipeline.decode(request_to_proto(asked))) as events:
                    await anext(events, None)
                    prefill_s = time.monotonic() - begun
                    async for _ in events:
                        pass
                most_prompt = PATIENCE_S * len(asked.prompt) / prefill_s
    except TimeoutError:
        log.warning("the tiers are not warm after %.0f s: the first requests will be slow", WARM_UP_S)
    log.info("warmed up in %.1f s", time.monotonic() - began)


async def warm_up_again(pipeline: Pipeline, target: RunningTarget, settings: Settings) -> None:
    """The first passes of a target that was started anew: a few, as kernels are on disk."""
    limits: Limits = await pipeline.actors.target.limits.remote()
    first = request_to_proto(request(stages(settings)[0], limits, SHORT_PROMPT))
    async with aclosing(target.decode(first.SerializeToString())) as events:
        async for _ in events:
            pass
