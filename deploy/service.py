"""Text completions for all APIs: admits requests, encodes prompts, and turns output tokens into text.

`Service` owns what the APIs share. It reaches a pipeline through the `Pipelines` protocol and does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from actors.wire import finish_reason_from_proto, logprobs_from_proto, stats_from_proto
from deploy import calls
from deploy.chat.template import ChatTemplate
from deploy.client_request import (
    DRAFTINGS,
    ClientRequest,
    check_drafter,
    check_lookaheads,
    check_places,
    check_prompt_logprobs,
    check_texts,
    check_unicode,
)
from deploy.encoding import Encoder
from deploy.errors import OverloadedError
from deploy.fair_share import FairShare
from deploy.journal import Journal, Turns
from deploy.merging import merged
from deploy.metrics import Meters, Scrape
from deploy.parts import Done, Part, Pipelines
from deploy.tracing import tracing
from triforce_core.building.fingerprint import target_fingerprint
from triforce_core.config import Settings
from triforce_core.detokenizer import OutputText, TextDelta, TokenText, joined, spellings
from triforce_core.engine.limits import Limits, target_limits
from triforce_core.engine.sequence import SEED_BITS, FinishReason, Request, Stats, nth_seed
from triforce_core.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidValueError,
    UnavailableError,
    UnknownModelError,
    require,
)
from triforce_core.messages import GREEDY, UNCHANGED, Drafting, SamplingParams, TokenLogprobs
from triforce_core.models.files import end_token_ids, load_config, load_tokenizer, stop_token_ids
from triforce_core.models.generation import default_sampling
from triforce_core.sampling.guides import Guide, no_token
from triforce_core.sampling.vetting import Vetting

MOST_JSON_BYTES = 12  # of a character in JSON: two escapes, such as \ud83d\ude00
OTHER_FIELDS_BYTES = 1 << 20  # of a body, besides its prompt
MANY_CHARACTERS = 8  # per token: a text with more characters than this per token of the context rarely fits the context
# Cutting a text changes its encoding near the cut. So the beginning alone may have more tokens than the whole text, but
# the difference is below this number.
CUT_TOKENS = 64
RESUMED_AT_ONCE = 64  # tokens of a resumed output that become text before the event loop serves others
FLUSH_S = 3.0  # limit for sending the last spans, where the collector does not answer
PROBE_S = 5.0  # limit for the probe, a completion of two tokens


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The target as clients know it."""

    name: str
    limits: Limits
    stop_token_ids: tuple[int, ...]
    tokenizer: Any
    fingerprint: str  # while it is unchanged, the same seed gives the same output
    lossy: str | None = None  # what its cache forgets, in words; None: nothing
    sampling: SamplingParams = UNCHANGED  # of requests that do not say
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, settings: Settings) -> ServedModel:
        target = settings.target.model
        return cls(
            name=served_name(settings),
            limits=target_limits(load_config(target, "target"), settings),
            stop_token_ids=stop_token_ids(target),
            tokenizer=load_tokenizer(target),
            fingerprint=target_fingerprint(settings),
            lossy=settings.target.lossy,
            sampling=default_sampling(settings),
        )


def served_name(settings: Settings) -> str:
    return settings.target.served_name or settings.target.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


class Service:
    """Serves completions. Each process that clients connect to has one, used on one asyncio loop."""

    def __init__(self, settings: Settings, model: ServedModel, pipelines: Pipelines) -> None:
        self.settings, self.model, self.pipelines = settings, model, pipelines
        self.meaning = TokenText(model.tokenizer)
        self.max_token_characters = max(map(len, model.tokenizer.get_vocab()))
        self.encoder = Encoder(model.tokenizer)
        added = model.tokenizer.added_tokens_decoder.items()
        self.added_ids = {token.content: token_id for token_id, token in added}
        context = model.limits.context_length
        self.chat = ChatTemplate(
            model.tokenizer, settings.target.chat_template, self.encoder, context * self.max_token_characters
        )
        self.vetting = Vetting(lambda: model.tokenizer, model.limits.vocab_size)
        self.room = settings.places
        self.in_flight = 0
        self.shares = FairShare(self.room)
        self.turns = Turns()
        self.served = False  # whether any completion has yielded a part
        self.draining = False
        self.why = ""  # what the machine means for where the tiers run, for /status; empty where it is not known
        self.meters = Meters(model.name, lambda: self.in_flight, lambda: self.room)
        self.scrape = Scrape(self.meters, pipelines)
        self.tracing = tracing(model.name)

    async def ready(self) -> None:
        """Raise `UnavailableError` unless the server takes requests and a pipeline can serve. Decodes nothing."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        await self.pipelines.check()

    async def check(self) -> None:
        """Raise `UnavailableError` unless a request would be served.

        If no request was served yet and none is in flight, this serves a short one itself, so that no user is the first
        to find a fault.
        """
        await self.ready()
        if self.served or self.in_flight:
            return
        try:
            probe = ClientRequest(prompt="a", sampling=GREEDY, max_tokens=2, timeout_s=PROBE_S)
            async for _ in self.complete(probe, counted=False):
                pass
        except DeadlineError as error:
            raise UnavailableError(f"no completion comes through: {error}") from None

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, send the last spans, and return whether those in flight ended within `timeout_s` s."""
        self.draining = True
        until = asyncio.get_running_loop().time() + timeout_s
        while self.in_flight and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        if self.tracing is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.tracing.flush), FLUSH_S)
        return not self.in_flight

    def ended(self, call: calls.Call) -> None:
        """A client's call has ended: log and count it, and make its spans."""
        call.end(self.settings.server.log)
        self.meters.ended(call)
        if self.tracing is not None and call.trace is not None:
            self.tracing.ended(call, call.trace)

    async def complete(self, *requests: ClientRequest, counted: bool = True) -> AsyncGenerator[Part, None]:
        """The parts of the requests' completions as they are decoded; closing the generator stops the requests. Several
        requests, which differ in their prompts alone, are admitted and fail together. `counted`: by the metrics.

        A completion goes on where an engine dies (`deploy.journal`). Raises `InvalidValueError` or a subclass,
        `OverloadedError`, `DeadlineError`, `UnavailableError`, `EngineCrashError` or `FingerprintError`. Errors in the
        request itself are raised before the first part, but for one: parameters that exclude every token in the middle
        of the output are reported when that happens.
        """
        asked = requests[0]
        watching = self.meters.watching(len(requests), asked.n) if counted else nullcontext()
        with watching as watch, self.placed(check_places(len(requests), asked.n, self.room)):
            self.check_model(asked.model or self.model.name)
            limit_s = self.settings.server.request_timeout_s
            if asked.timeout_s is not None:
                require(0 < asked.timeout_s < math.inf, "timeout_s", asked.timeout_s, "must be above 0 and finite")
                limit_s = min(limit_s, asked.timeout_s)
            deadline = asyncio.get_running_loop().time() + limit_s
            try:
                completions: list[AsyncGenerator[Part, None]] = []
                prompt_tokens = 0
                for position, each in enumerate(requests):
                    try:
                        async with asyncio.timeout_at(deadline):
                            made = each if each.prepare is None else await each.prepare()
                            request = await self.request(made)
                    except InvalidValueError as error:
                        if error.field != "prompt" or len(requests) == 1:
                            raise
                        raise type(error)(f"prompt.{position}", error.value, error.rule) from None
                    prompt_tokens += len(request.prompt)
                    check_prompt_logprobs(made, prompt_tokens)
                    if watch is not None:
                        watch.call.prompt_tokens += len(request.prompt)
                    first = len(completions)
                    completions += [self.parts(made, request, nth, deadline, first) for nth in range(each.n)]
                async with aclosing(completions[0] if len(completions) == 1 else merged(completions)) as parts:
                    async for part in parts:
                        self.served = True
                        if watch is not None:
                            watch.saw(part)
                        yield part
            except (TimeoutError, DeadlineError):  # this clock or the engine's
                raise DeadlineError(f"the request was not done within {limit_s:g} s") from None

    @contextmanager
    def placed(self, places: int = 1) -> Iterator[None]:
        """Hold places for the current call while the block runs. Raises `UnavailableError` or `OverloadedError`."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        key = calls.current().key
        if self.in_flight + places > self.room:
            self.shares.refused(key, places)
            raise OverloadedError(f"{self.in_flight} of {self.room} places are taken; try again later")
        self.shares.take(key, places)
        self.in_flight += places
        try:
            yield
        finally:
            self.in_flight -= places
            self.shares.give_back(key, places)

    def check_model(self, name: str) -> None:
        if name != self.model.name:
            raise UnknownModelError("model", name, f"is not served here; {self.model.name!r} is")

    async def request(self, asked: ClientRequest) -> Request:
        """The request for the pipeline. Everything that the pipeline would refuse is refused here.

        Raises `InvalidValueError` or a subclass.
        """
        check_texts(asked)
        whole = asked.n == 1 or not asked.resume
        require(whole, "resume_token_ids", f"with n: {asked.n}", "continue one completion: ask with its own seed")
        lookaheads, drafting = self.plan(asked)
        fits = asked.truncate_prompt_tokens is None
        prompt = await self.encode(asked.prompt, fits=fits) if isinstance(asked.prompt, str) else asked.prompt
        if asked.truncate_prompt_tokens is not None:
            kept = asked.truncate_prompt_tokens
            require(kept >= 1, "truncate_prompt_tokens", kept, "must be at least 1")
            prompt = prompt[-kept:]
        limits, own_stops = self.model.limits, () if asked.ignore_eos else self.model.stop_token_ids
        longest_output = limits.longest_output(len(prompt)) if asked.max_tokens is None else asked.max_tokens
        if asked.fits:
            longest_output = min(longest_output, limits.longest_output(len(prompt)))
        request = Request(
            prompt=prompt,
            max_tokens=1 if asked.only_prompt else longest_output,
            sampling=await self.sampling(asked),
            seed=secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed,
            lookaheads=lookaheads,
            drafting=drafting,
            selector=asked.selector,
            cache_salt=self.cache_salt(asked),
            stop_token_ids=tuple(dict.fromkeys((*own_stops, *asked.stop_token_ids))),
            resume=asked.resume,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs,
            priority=asked.priority,
        )
        limits.check(request)
        if asked.guide is None:
            return request
        # A complete output must be able to end, even if the model's configuration names no stop token.
        stops = dict.fromkeys((*request.stop_token_ids, *end_token_ids(self.model.tokenizer)))
        return replace(request, grammar=await self.grammar(asked, asked.guide), stop_token_ids=tuple(stops))

    def cache_salt(self, asked: ClientRequest) -> str:
        """The client's salt and its key's name: no key's clients can tell by times what another's have sent."""
        key = calls.current().key
        return f"{key}/{asked.cache_salt}" if key else asked.cache_salt  # no key's name has a slash

    async def sampling(self, asked: ClientRequest) -> SamplingParams:
        """The request's sampling parameters, with the tokens of its bad words."""
        words = [await self.encoder.encode(text, special=False) for text in spellings(asked.bad_words)]
        return replace(asked.sampling, bad_word_ids=(*asked.sampling.bad_word_ids, *dict.fromkeys(words)))

    async def grammar(self, asked: ClientRequest, guide: Guide) -> str:
        """The grammar of the output. Raises `InvalidValueError` for one that cannot be compiled."""
        require(not asked.ignore_eos, "ignore_eos", True, f"contradicts {guide.name}, whose output has an end")
        grammar = await asyncio.to_thread(guide.grammar)
        guide.check(await self.vetting.error(grammar))
        return grammar

    @property
    def most_body_bytes(self) -> int:
        """The most bytes that a request needs: of the context's longest prompt, in JSON, and of the other fields."""
        longest_prompt = self.model.limits.context_length * self.max_token_characters
        return MOST_JSON_BYTES * longest_prompt + OTHER_FIELDS_BYTES

    async def encode(self, text: str, *, special: bool = True, fits: bool = False) -> tuple[int, ...]:
        """The text's tokens, by default with the special ones that the tokenizer adds.

        `fits`: whether they must fit the context; a text that is far too long is then refused sooner. Raises
        `InvalidValueError` or a subclass.
        """
        require(text != "", "prompt", text, "must not be empty")
        context = self.model.limits.context_length
        if len(text) > context * self.max_token_characters:
            rule = (
                f"cannot fit the context of {context} tokens, none of which is longer than {self.max_token_characters}"
            )
            raise ContextLengthError("prompt", f"{len(text)} characters", rule)
        check_unicode("prompt", text)
        beginning = text[: MANY_CHARACTERS * context]
        if fits and len(beginning) < len(text):
            # Most texts of this length are far too long. To encode a megabyte whole would take most of a second of CPU
            # time, which the tiers may need.
            count = len(await self.encoder.encode(beginning, special=special))
            if count > context + CUT_TOKENS:
                raise ContextLengthError(
                    "prompt", f"over {count - CUT_TOKENS} tokens", f"must fit the context of {context} tokens"
                )
        return await self.encoder.encode(text, special=special)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The tokens' text, special ones included. Raises `InvalidValueError` or a subclass."""
        context = self.model.limits.context_length
        if len(tokens) > context:
            raise ContextLengthError("tokens", f"{len(tokens)} tokens", f"must fit the context of {context} tokens")
        self.model.limits.check_tokens("tokens", tuple(tokens))
        return await self.encoder.decode(tokens)

    async def parts(
        self, asked: ClientRequest, request: Request, index: int, deadline: float, first: int = 0
    ) -> AsyncGenerator[Part, None]:
        """Decode completion `index` of the request, and turn tokens into text, until the output ends. `first` is the
        number of completions of the requests before it.
        """
        scored = request.prompt_logprobs if index == 0 or asked.every_prompt_logprobs else None
        request = replace(request, seed=nth_seed(request.seed, index), prompt_logprobs=scored)
        output = OutputText(
            self.meaning.showing(asked.shown) if asked.shown else self.meaning,
            stop=asked.stop,
            end_tokens=request.stop_token_ids,
            num_resumed=len(request.resume),
            min_tokens=request.sampling.min_tokens,
            include_stop=asked.include_stop,
        )
        frame = Part(
            TextDelta("", (), b""),
            request.seed,
            len(request.prompt),
            index=first + index,
            prompt=request.prompt,
            lossy=self.model.lossy,
        )
        for first_token in range(0, len(request.resume), RESUMED_AT_ONCE):
            tokens = request.resume[first_token : first_token + RESUMED_AT_ONCE]
            output.feed(tokens, bytes(len(tokens)))
            await asyncio.sleep(0)  # other streams go on
        if output.stopped:  # the client already has the whole output
            yield replace(
                frame, piece=output.finish(), done=Done(FinishReason.STOP, output.num_tokens, Stats(), output.found)
            )
            return
        echoed = self.prompt_text(asked, request) if asked.echo and not request.resume else ""
        scores: tuple[TokenLogprobs, ...] = ()
        in_each = bool(asked.stop) or asked.progress  # a stop string ends the output at any event
        journal = Journal(self.pipelines, self.turns, request, deadline, asked.fingerprint, stats_in_each=in_each)
        async with aclosing(journal.events()) as events:
            async for event in events:
                scores += logprobs_from_proto(event.prompt_logprobs)
                frame = replace(frame, fingerprint=journal.fingerprint, cached_tokens=journal.cached_tokens or 0)
                piece = TextDelta("", (), b"")
                if not asked.only_prompt:
                    piece = output.feed(event.token_ids, event.origins, logprobs_from_proto(event.logprobs))
                finish_reason = finish_reason_from_proto(event.finish_reason)
                if output.stopped or finish_reason is not None:
                    break
                if piece.text or piece.tokens or scores:
                    piece = replace(piece, text=echoed + piece.text)
                    so_far = event.stats if asked.progress else None
                    yield replace(frame, piece=piece, prompt_logprobs=scores, echoed=len(echoed), so_far=so_far)
                    echoed, scores = "", ()
                if event.no_token:
                    raise no_token(asked.guide, output.num_tokens)
            last = joined([piece, output.finish()])
        reason = FinishReason.STOP if output.stopped or finish_reason is None else finish_reason
        if asked.only_prompt:
            reason = FinishReason.LENGTH
        done = Done(reason, output.num_tokens, stats_from_proto(event.stats), output.found, journal.reached_at)
        last = replace(last, text=echoed + last.text)
        yield replace(frame, piece=last, done=done, prompt_logprobs=scores, echoed=len(echoed))

    def prompt_text(self, asked: ClientRequest, request: Request) -> str:
        whole = isinstance(asked.prompt, str) and asked.truncate_prompt_tokens is None
        return str(asked.prompt) if whole else self.meaning.decode([*request.prompt])

    def plan(self, asked: ClientRequest) -> tuple[tuple[int, int] | None, Drafting]:
        """The lookaheads that the request pins, None if it leaves them to the target, and who drafts."""
        check_drafter("drafter", asked.drafter)
        rule = f"must be left out: target.eviction is {self.settings.target.eviction}, and nothing drafts"
        for name, value in (("drafter", asked.drafter), ("selector", asked.selector)):
            require(value is None or self.model.lossy is None, name, value, rule)
        drafting = DRAFTINGS[asked.drafter or "model"]
        if asked.lookaheads is not None:
            check_lookaheads("lookaheads", asked.lookaheads)
            return (asked.lookaheads[0], asked.lookaheads[1]), drafting
        return None if asked.drafter is None else self.settings.speculation.effective, drafting
