"""The gRPC API, which the SDK uses: generation.proto over `Service`, served by Ray Serve's gRPC proxy."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from actors.wire import finish_reason_to_proto, logprobs_to_proto, sampling_from_client, seed_from_proto, seed_to_proto
from deploy.bounded_json import bounded_loads
from deploy.client_request import MAX_MESSAGES, MAX_STOP_STRINGS, MAX_TOOLS, MAX_WORDS, ClientRequest
from deploy.parts import Done, Part
from deploy.service import Service
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.engine.limits import MAX_STOP_TOKENS
from triforce_core.engine.sequence import Stats
from triforce_core.errors import ContextLengthError, InvalidValueError, require
from triforce_core.messages import MAX_BAD_WORDS, MAX_BIASED_TOKENS
from triforce_core.sampling.guides import MAX_CHOICES, Guide


async def client_request_from(service: Service, request: pb.GenerateRequest) -> ClientRequest:
    """The service's form of a request; a conversation is rendered by its `prepare`. Both raise `InvalidValueError`."""
    check_lists(service, request)
    converses = request.WhichOneof("prompt") == "messages"
    asked = ClientRequest(
        prompt="" if converses else await prompt_of(service, request),
        sampling=sampling_from_client(request.sampling, service.model.sampling),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        seed=seed_from_proto(request.seed) if request.HasField("seed") else None,
        stop=tuple(request.stop),
        model=request.model,
        lookaheads=tuple(request.lookaheads.values) if request.HasField("lookaheads") else None,
        resume=tuple(request.resume_token_ids),
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        n=request.n if request.HasField("n") else 1,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        bad_words=tuple(request.bad_words),
        guide=guide_from(request),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        echo=request.echo,
        priority=request.priority,
        drafter=request.drafter or None,
        selector=request.selector or None,
        cache_salt=request.cache_salt,
        fingerprint=request.fingerprint,
    )

    async def prepare() -> ClientRequest:
        return replace(asked, prompt=await prompt_of(service, request))

    return replace(asked, prepare=prepare) if converses else asked


def check_lists(service: Service, request: pb.GenerateRequest) -> None:
    """Raise `InvalidValueError` for a list that is too long, before its elements are read."""
    sampling, context = request.sampling, service.model.limits.context_length
    for field, given, most in (
        ("stop", request.stop, MAX_STOP_STRINGS),
        ("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKENS),
        ("bad_words", request.bad_words, MAX_WORDS),
        ("bad_word_ids", sampling.bad_word_ids, MAX_BAD_WORDS),
        ("logit_bias", sampling.logit_bias, MAX_BIASED_TOKENS),
        ("choice", request.choice.values, MAX_CHOICES),
        ("resume_token_ids", request.resume_token_ids, context),
    ):
        require(len(given) <= most, field, f"{len(given)} entries", f"must be at most {most}")
    if (count := len(request.token_ids.values)) > context:
        raise ContextLengthError("prompt", f"{count} tokens", f"must fit the context of {context} tokens")


async def prompt_of(service: Service, request: pb.GenerateRequest | pb.TokenizeRequest) -> str | tuple[int, ...]:
    """The prompt, that of a conversation as tokens. Raises `InvalidValueError` naming the field."""
    form = request.WhichOneof("prompt")
    require(form is not None, "prompt", None, "must be a text, token ids or messages")
    if form == "messages":
        messages = await asyncio.to_thread(messages_of, request.messages)
        tools = await asyncio.to_thread(objects_of, request.messages.tools_json, "tools_json", MAX_TOOLS)
        return await service.chat.render(messages, tools)
    if form == "token_ids" and isinstance(request, pb.GenerateRequest):
        return tuple(request.token_ids.values)
    return request.text


def guide_from(request: pb.GenerateRequest) -> Guide | None:
    form = request.WhichOneof("guide")
    if form is None:
        return None
    value = getattr(request, form)
    return Guide(form, tuple(value.values) if form == "choice" else value)


async def generate(service: Service, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """The whole completions. A text is set once, because a message keeps every value that its field has had."""
    response = pb.GenerateResponse(model=service.model.name)
    texts, origins = defaultdict[int, list[str]](list), defaultdict[int, list[bytes]](list)  # by choice
    async with aclosing(generate_stream(service, request)) as chunks:
        async for chunk in chunks:
            while len(response.choices) <= chunk.index:
                response.choices.add()
            choice = response.choices[chunk.index]
            if chunk.HasField("seed"):
                choice.seed = chunk.seed
            texts[chunk.index].append(chunk.text)
            choice.token_ids.extend(chunk.token_ids)
            origins[chunk.index].append(chunk.origins)
            choice.logprobs.extend(chunk.logprobs)
            response.prompt_logprobs.extend(chunk.prompt_logprobs)
            if chunk.HasField("usage"):
                choice.finish_reason = chunk.finish_reason
                choice.stats.CopyFrom(chunk.stats)
                response.usage.prompt_tokens = chunk.usage.prompt_tokens
                response.usage.completion_tokens += chunk.usage.completion_tokens
                if chunk.index == 0:
                    response.usage.cached_tokens = chunk.usage.cached_tokens
    for index, choice in enumerate(response.choices):
        choice.text, choice.origins = "".join(texts[index]), b"".join(origins[index])
    return response


async def generate_stream(service: Service, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateChunk, None]:
    """The completions in chunks, as they are decoded."""
    begun = set[int]()
    async with aclosing(service.complete(await client_request_from(service, request))) as parts:
        async for part in parts:
            yield chunk_of(part, with_seed=part.index not in begun)
            begun.add(part.index)


def chunk_of(part: Part, *, with_seed: bool) -> pb.GenerateChunk:
    chunk = pb.GenerateChunk(
        text=part.piece.text,
        token_ids=part.piece.tokens,
        origins=part.piece.origins,
        index=part.index,
        logprobs=logprobs_to_proto(part.piece.logprobs),
        prompt_logprobs=logprobs_to_proto(part.prompt_logprobs),
        text_lengths=part.piece.lengths,
    )
    if with_seed:
        chunk.seed, chunk.fingerprint = seed_to_proto(part.seed), part.fingerprint
    if part.done:
        finish(chunk, part, part.done)
    return chunk


def finish(chunk: pb.GenerateChunk, part: Part, done: Done) -> None:
    chunk.finish_reason = finish_reason_to_proto(done.finish_reason)
    chunk.usage.prompt_tokens, chunk.usage.completion_tokens = part.prompt_tokens, done.completion_tokens
    chunk.usage.cached_tokens = part.cached_tokens
    chunk.stats.CopyFrom(stats_of(done.stats, part.lossy))


def stats_of(stats: Stats, lossy: str | None) -> pb.Stats:
    return pb.Stats(
        lossy=lossy or "",
        prefill_s=stats.prefill_s,
        ms_per_token=stats.ms_per_token,
        tokens_per_round=stats.tokens_per_round,
        preempted=stats.preempted,
        acceptance=pb.Acceptance(**stats.acceptance),
        controller=pb.Controller(
            plan=stats.plan,
            rounds=stats.plans,
            changes=stats.plan_changes,
            expected_ms_per_token=stats.expected_ms,
            plain_ms_per_token=stats.plain_ms,
        ),
    )


def list_models(service: Service) -> pb.ListModelsResponse:
    model = service.model
    named = pb.Model(id=model.name, context_length=model.limits.context_length, lossy=model.lossy or "")
    return pb.ListModelsResponse(models=[named])


async def tokenize(service: Service, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    service.check_model(request.model or service.model.name)
    with service.placed():
        prompt = await prompt_of(service, request)
        tokens = await service.encode(prompt) if isinstance(prompt, str) else prompt
    return pb.TokenizeResponse(token_ids=tokens, context_length=service.model.limits.context_length)


async def detokenize(service: Service, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    service.check_model(request.model or service.model.name)
    with service.placed():
        return pb.DetokenizeResponse(text=await service.decode(request.token_ids))


# -- conversations in OpenAI's form, as the chat template reads them; not for an event loop: a long one takes time -----


def messages_of(chat: pb.ChatMessages) -> list[dict[str, Any]]:
    """The messages. Raises `InvalidValueError` naming the field."""
    count = len(chat.messages)
    require(count <= MAX_MESSAGES, "messages", f"{count} messages", f"must be at most {MAX_MESSAGES}")
    return [message_of(each, f"messages.{index}") for index, each in enumerate(chat.messages)]


def message_of(message: pb.ChatMessage, place: str) -> dict[str, Any]:
    calls = objects_of(message.tool_calls_json, f"{place}.tool_calls_json", MAX_MESSAGES)
    for index, call in enumerate(calls):
        function = call.get("function")
        texts = isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))
        rule = "must have a function with name and arguments, both texts"
        require(texts, f"{place}.tool_calls_json.{index}", call, rule)
    given = {"content": message.content, "name": message.name, "tool_call_id": message.tool_call_id}
    found: dict[str, Any] = {"role": message.role, **{name: value for name, value in given.items() if value}}
    if calls:
        return found | {"tool_calls": calls}
    return {"content": "", **found}


def objects_of(text: str, field: str, most: int) -> list[dict[str, Any]]:
    """A JSON list of at most so many objects; an empty text is an empty list."""
    if not text:
        return []
    try:
        found = bounded_loads(text.encode(), field)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(field, text[:80], f"must be JSON: {error}") from None
    objects = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    require(objects, field, text[:80], "must be a JSON list of objects")
    require(len(found) <= most, field, f"{len(found)} objects", f"must be at most {most}")
    return list(found)
