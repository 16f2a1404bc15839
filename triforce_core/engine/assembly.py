"""How tiers are put together: each one for an actor of its own, and all of them in one process."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from triforce_core.attention import kernel_for
from triforce_core.config import Settings
from triforce_core.decoder import SpeculativeDecoder
from triforce_core.doorbell import Doorbell
from triforce_core.engine.engine import Engine, SnapshotPolicy
from triforce_core.engine.limits import target_limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import Output, Request
from triforce_core.engine.target_kv import target_kv
from triforce_core.errors import require
from triforce_core.kv.memory import check_room
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.snapshot import ChunkSettings, SnapshotSink
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import Proposer, Tier
from triforce_core.models.load import (
    check_pair,
    check_same_vocabulary,
    check_self_drafter,
    context_length,
    kv_geometry,
    load_model,
)
from triforce_core.models.runner import ModelRunner, threads_for
from triforce_core.roles import ModelProposer, ModelVerifier, NoProposer

MAX_BLOCK = 2 * 64 + 2  # the longest block that lookaheads of 64 can give, and the tokens around it


def draft_proposer(model: PreTrainedModel, settings: Settings) -> ModelProposer:
    """The draft tier."""
    window = WindowSettings(settings.draft.sinks, settings.draft.window, settings.draft.slack)
    positions = context_length(model.config)
    rule = f"tokens of sinks, window and slack must fit the drafter's {positions} positions"
    require(window.capacity <= positions, "draft", window.capacity, rule)
    geometry, sequences = kv_geometry(model), settings.max_sequences
    num_bytes = geometry.bytes_per_token * window.capacity * sequences
    check_room(geometry.device, num_bytes, "max_sequences", sequences, "lower it or draft.window")
    kv = StreamingKV(geometry, sequences, window, kernel_for(settings))
    return ModelProposer(ModelRunner(model, kv, threads_for(model, settings)))


def retrieval_kv(model: PreTrainedModel, settings: Settings) -> RetrievalKV:
    """The retrieval tier's cache; its tail has room for what is decoded while the next snapshot is on its way."""
    tail = 2 * settings.retrieval.refresh_every + MAX_BLOCK
    geometry, sequences, budget = kv_geometry(model), settings.max_sequences, settings.retrieval.budget
    num_bytes = geometry.bytes_per_token * (budget + tail) * sequences
    check_room(geometry.device, num_bytes, "retrieval.budget", budget, f"lower it or max_sequences, {sequences}")
    return RetrievalKV(geometry, sequences, budget, tail, kernel_for(settings))


def retrieval_verifier(model: PreTrainedModel, kv: RetrievalKV, settings: Settings) -> ModelVerifier:
    """The retrieval tier by itself."""
    return ModelVerifier(ModelRunner(model, kv, threads_for(model, settings)), Tier.RETRIEVAL)


def retrieval_decoder(
    model: PreTrainedModel, kv: RetrievalKV, drafts: Proposer, settings: Settings, *, micro_batches: int = 1
) -> SpeculativeDecoder:
    """The retrieval tier over whatever drafts for it."""
    return SpeculativeDecoder(drafts, retrieval_verifier(model, kv, settings), micro_batches=micro_batches)


def target_engine(
    model: PreTrainedModel,
    settings: Settings,
    below: Proposer,
    sink: SnapshotSink,
    *,
    micro_batches: int = 1,
    first_sequence_id: int = 1,
    doorbell: Doorbell | None = None,
) -> Engine:
    """The target tier over whatever proposes to it, with the engine that drives the chain."""
    limits = target_limits(model.config, settings)
    kv = target_kv(kv_geometry(model), limits.kv_pool_tokens, settings)
    verifier = ModelVerifier(ModelRunner(model, kv, threads_for(model, settings)), Tier.TARGET)
    decoder = SpeculativeDecoder(below, verifier, micro_batches=micro_batches)
    scheduler = Scheduler(kv, max_sequences=settings.max_sequences, prefill_chunk=settings.target.prefill_chunk)
    chunks = ChunkSettings(settings.retrieval.budget, settings.retrieval.chunk, settings.retrieval.recent)
    selector = SELECTORS[settings.retrieval.selector]()
    refresh_every, resync_every = settings.retrieval.refresh_every, settings.retrieval.resync_every
    policy = SnapshotPolicy(kv, sink, chunks, selector, refresh_every, resync_every)
    return Engine(decoder, scheduler, policy, limits, first_sequence_id, doorbell)


def local_engine(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    settings: Settings,
    self_drafter: PreTrainedModel | None = None,
) -> Engine:
    """The whole chain in this process. Without weights of its own the retrieval tier shares the target's; without a
    drafter nothing is drafted below it.
    """
    own = target if self_drafter is None else self_drafter
    sparse = retrieval_kv(own, settings)
    drafts: Proposer = NoProposer()
    if drafter is not None:
        check_same_vocabulary(target.config, drafter.config)
        drafts = draft_proposer(drafter, settings)
    return target_engine(target, settings, retrieval_decoder(own, sparse, drafts, settings), sparse)


def load_local_engine(settings: Settings, *, drafting: bool | None = None) -> Engine:
    """The chain of the models that the settings name, checked to go together before any weights are loaded.

    `drafting`: with the drafter; by default where the settings' own lookaheads use it.
    """
    if drafting is None:
        drafting = settings.speculation.effective[1] > 0
    check_pair(settings.target.model, settings.draft.model if drafting else None)
    if settings.retrieval.model:
        check_self_drafter(settings.target.model, settings.retrieval.model)

    def load(name: str, role: str) -> PreTrainedModel:
        return load_model(name, role, settings.dtype, settings.device)

    return local_engine(
        load(settings.target.model, "target"),
        load(settings.draft.model, "drafter") if drafting else None,
        settings,
        load(settings.retrieval.model, "self-drafter") if settings.retrieval.model else None,
    )


def runners_of(engine: Engine) -> dict[Tier, ModelRunner]:
    """Each tier's, down the chain of one process."""
    runners: dict[Tier, ModelRunner] = {}
    level: Proposer = engine.decoder
    while isinstance(level, SpeculativeDecoder):
        assert isinstance(level.verifier, ModelVerifier)
        runners[level.verifier.tier] = level.verifier.runner
        level = level.proposer
    if isinstance(level, ModelProposer):
        runners[level.tier] = level.runner
    return runners


def run_to_end(engine: Engine, requests: list[Request]) -> Iterator[Output]:
    """Submit requests and run the loop until all have finished, yielding what is committed as it comes."""
    left = {engine.submit(request) for request in requests}
    while left:
        for output in engine.run_once():
            if output.finish_reason:
                left.discard(output.sequence_id)
            yield output
