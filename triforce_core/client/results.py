"""The client's results: plain frozen values, built from the messages of generation.proto."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from triforce_core._gen.triforce.v1 import generation_pb2 as pb

FinishReason = Literal["stop", "length"]

FINISH_REASONS: dict[int, FinishReason] = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.upper()}"): reason for reason in get_args(FinishReason)
}


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  #: of `prompt_tokens`, those whose KV the server held from earlier calls


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted share of the verified tokens, by the tier that proposed them; None where none were verified.

    Tokens after the first rejected one of a round are not counted.
    """

    draft: float | None
    retrieval: float | None


@dataclass(frozen=True, slots=True)
class Controller:
    """How the completion was drafted."""

    plan: str = ""  #: of the latest round, such as `retrieval+model 8,3`, or `plain`
    rounds: dict[str, int] = field(default_factory=dict)  #: rounds of the target by kind of plan
    changes: int = 0  #: how often the server changed the kind of plan
    #: As expected with the latest plan, and with plain decoding; None where the call set its lookaheads.
    expected_ms_per_token: float | None = None
    plain_ms_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Speed of the decoding, by the engine that ended the output. `ms_per_token`, `tokens_per_round` and the
    acceptances are None if no token was decoded after the first; an acceptance also if none of its tier's tokens were
    verified.
    """

    prefill_s: float
    ms_per_token: float | None
    tokens_per_round: float | None  #: mean output tokens per round of the target; 1 is plain decoding
    acceptance: Acceptance
    preempted: int = 0  #: how many times its KV was dropped because the server's pool was full
    controller: Controller = field(default_factory=Controller)
    lossy: str | None = None  #: what the target has forgotten, in words; None: the output is the model's own


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token in the model's own distribution, before any sampling parameter."""

    logprob: float | None  #: None for the first token of a prompt, which nothing predicts
    top: dict[int, float]  #: the most probable token ids with theirs, the best first


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished completion."""

    text: str
    token_ids: tuple[int, ...]
    origins: bytes  #: where each token comes from: 0 draft, 1 retrieval, 2 target, 3 prompt lookup
    finish_reason: FinishReason | None  #: None: a reason that this version of the SDK does not know
    stats: Stats
    #: For the first completion the call's own seed, given or drawn by the client; for the others one derived from it. A
    #: call with this seed gives this completion.
    seed: int
    logprobs: tuple[TokenLogprobs, ...] = ()  #: one per token, if asked for


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a call: a completion, or several where the call has `n`. `text` and the like are the first's."""

    model: str
    choices: tuple[Choice, ...]
    usage: Usage  #: of all choices together
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  #: one per token of the prompt, if asked for

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def origins(self) -> bytes:
        return self.choices[0].origins

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def stats(self) -> Stats:
        return self.choices[0].stats

    @property
    def seed(self) -> int:
        return self.choices[0].seed

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a completion. Its first chunk has the seed; its last one has finish reason, usage and stats."""

    text: str  #: may be empty while `token_ids` is not, and vice versa
    token_ids: tuple[int, ...]
    origins: bytes  #: where each token comes from: 0 draft, 1 retrieval, 2 target, 3 prompt lookup
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    stats: Stats | None = None
    seed: int | None = None
    index: int = 0  #: which of the call's `n` completions it continues
    logprobs: tuple[TokenLogprobs, ...] = ()  #: one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  #: of some tokens of the prompt; in the first chunks, if asked for
    text_lengths: tuple[int, ...] = ()  #: one per token: how many characters of `text` it completes
    fingerprint: str | None = None  #: in the first chunk: of the model and of the settings that determine its tokens


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    context_length: int  #: tokens of prompt and output together
    lossy: str | None = None  #: what the target forgets, in words; None: nothing


def completion_from_proto(message: pb.GenerateResponse) -> Completion:
    return Completion(
        model=message.model,
        choices=tuple(
            Choice(
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                origins=choice.origins,
                finish_reason=FINISH_REASONS.get(choice.finish_reason),
                stats=_stats(choice.stats),
                seed=_signed(choice.seed),
                logprobs=_logprobs(choice.logprobs),
            )
            for choice in message.choices
        ),
        usage=_usage(message.usage),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
    )


def chunk_from_proto(message: pb.GenerateChunk) -> Chunk:
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        origins=message.origins,
        finish_reason=FINISH_REASONS.get(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        stats=_stats(message.stats) if message.HasField("stats") else None,
        seed=_signed(message.seed) if message.HasField("seed") else None,
        index=message.index,
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        text_lengths=tuple(message.text_lengths),
        fingerprint=message.fingerprint or None,
    )


def models_from_proto(message: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(Model(model.id, model.context_length, model.lossy or None) for model in message.models)


def _signed(seed: int) -> int:
    """The signed 64-bit integer with this two's complement."""
    return seed - 2**64 if seed >= 2**63 else seed


def _logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            each.logprob if each.HasField("logprob") else None, dict(zip(each.top_ids, each.top_logprobs, strict=True))
        )
        for each in messages
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def _stats(message: pb.Stats) -> Stats:
    acceptance = message.acceptance
    return Stats(
        prefill_s=message.prefill_s,
        ms_per_token=message.ms_per_token if message.HasField("ms_per_token") else None,
        tokens_per_round=message.tokens_per_round if message.HasField("tokens_per_round") else None,
        acceptance=Acceptance(
            draft=acceptance.draft if acceptance.HasField("draft") else None,
            retrieval=acceptance.retrieval if acceptance.HasField("retrieval") else None,
        ),
        preempted=message.preempted,
        controller=_controller(message.controller),
        lossy=message.lossy or None,
    )


def _controller(message: pb.Controller) -> Controller:
    return Controller(
        plan=message.plan,
        rounds=dict(message.rounds),
        changes=message.changes,
        expected_ms_per_token=message.expected_ms_per_token if message.HasField("expected_ms_per_token") else None,
        plain_ms_per_token=message.plain_ms_per_token if message.HasField("plain_ms_per_token") else None,
    )
