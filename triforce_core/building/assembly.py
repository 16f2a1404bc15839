"""Assembly of the tiers: each one alone for its own actor, or the whole chain in one process."""

import math
from dataclasses import replace

from transformers import PreTrainedModel

from triforce_core.attention import kernel_for
from triforce_core.building.drafters import drafter_for, drafter_weights, most_nodes
from triforce_core.building.exactness import make_exact
from triforce_core.building.lossy import Lossy, NothingBelow, lossy_kv
from triforce_core.building.runners import grammars_for, runner_for
from triforce_core.building.target_kv import target_kv
from triforce_core.building.trial import decoded_tokens, scored_tokens
from triforce_core.config import Settings
from triforce_core.doorbell import Doorbell
from triforce_core.engine.controller import Controller
from triforce_core.engine.engine import Engine, SnapshotSchedule
from triforce_core.engine.limits import target_limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.kv.base import KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.sizes import retrieval_tail
from triforce_core.kv.snapshot import ChunkSettings, SnapshotSink
from triforce_core.machine.memory import WHOLE, Share, check_room
from triforce_core.messages import Drafting, Proposer, Tier
from triforce_core.models.audit import ROUNDING, Audit
from triforce_core.models.load import kv_geometry
from triforce_core.models.rank_group import Leader
from triforce_core.models.replay import LeadingFullKV, LeadingKV, LeadingRetrievalKV
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.verification import ModelVerifier


def retrieval_kv(model: PreTrainedModel, settings: Settings) -> RetrievalKV:
    """The retrieval tier's cache."""
    tail = retrieval_tail(settings)
    geometry, sequences, budget = kv_geometry(model), settings.max_sequences, settings.retrieval.budget
    num_bytes = geometry.bytes_per_token * (budget + tail) * sequences
    check_room(geometry.device, num_bytes, "retrieval.budget", budget, f"lower it or max_sequences, {sequences}")
    chunks = ChunkSettings.halved(budget, settings.retrieval.chunk)
    return RetrievalKV(geometry, sequences, chunks, tail, kernel_for(settings, geometry.head_dim))


def few_retrieval_tokens(settings: Settings) -> int:
    """Most tokens per sequence in its decoding pass: the drafted ones, the one before, and one that may be lacking; or
    a tree, and as many that were accepted last, because their KV was not kept.
    """
    return settings.speculation.effective[1] + 2 + most_nodes(settings)


def retrieval_verifier(model: PreTrainedModel, kv: KVCache | LeadingKV, settings: Settings) -> ModelVerifier:
    """The verifier of the retrieval tier, without the drafter below it."""
    runner = runner_for(model, kv, settings, few_retrieval_tokens(settings))
    return ModelVerifier(runner, Tier.RETRIEVAL, grammars_for(settings, model.config.vocab_size))


def retrieval_decoder(
    model: PreTrainedModel, kv: KVCache | LeadingKV, drafts: Proposer, settings: Settings
) -> SpeculativeDecoder:
    """The retrieval tier on top of its drafter `drafts`."""
    return SpeculativeDecoder(drafts, retrieval_verifier(model, kv, settings))


def target_engine(
    model: PreTrainedModel,
    settings: Settings,
    below: Proposer,
    sink: SnapshotSink,
    *,
    kv: FullKV | LeadingFullKV | Lossy | None = None,
    micro_batches: int = 1,
    first_sequence_id: int = 1,
    doorbell: Doorbell | None = None,
) -> Engine:
    """The engine, with the target tier on top of `below`, the tiers that propose to it. By default `kv` is created."""
    kv, stall_ms = kv or target_kv(model, settings), settings.target.max_stall_ms
    slots = (kv.kv if isinstance(kv, LeadingFullKV) else kv).allocator.num_slots
    limits = replace(target_limits(model.config, settings), kv_pool_tokens=settings.target.kv_pool_tokens or slots)
    runner = runner_for(model, kv, settings, decoded_tokens(settings))
    inexact = make_exact(runner, kv, settings) if isinstance(kv, FullKV) else settings.inexact
    verifier = ModelVerifier(runner, Tier.TARGET, grammars_for(settings, model.config.vocab_size))
    if settings.target.audit:
        assert isinstance(kv, FullKV), "audits are refused where the target is divided over ranks"
        rounding = ROUNDING[kv.geometry.dtype] if inexact else 0.0
        verifier.audit = Audit(runner, kv, verifier.drawer, settings.target.audit, rounding)
    decoder = SpeculativeDecoder(below, verifier, micro_batches=micro_batches)
    scheduler = Scheduler(
        kv,
        max_sequences=settings.max_sequences,
        prefill_chunk=settings.target.prefill_chunk,
        scored_chunk=scored_tokens(settings, limits.vocab_size),
        costs=runner.clock.costs,
        max_stall_s=math.inf if stall_ms is None else stall_ms / 1e3,
        longest_block=sum(settings.speculation.effective),
    )
    chunks = ChunkSettings.halved(settings.retrieval.budget, settings.retrieval.chunk)
    policy = SnapshotSchedule(kv, sink, chunks, settings.retrieval.selector, settings.retrieval.refresh_every)
    own_drafter = Drafting.LOOKUP if settings.draft.model == "ngram" else Drafting.MODEL
    draftings = tuple(Drafting) if drafter_weights(settings) else (own_drafter,)
    given = settings.speculation.effective, draftings, most_nodes(settings)
    controller = Controller(*given) if settings.controlled else None
    return Engine(decoder, scheduler, policy, limits, first_sequence_id, doorbell, controller, inexact)


def local_engine(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    settings: Settings,
    self_drafter: PreTrainedModel | None = None,
    *,
    ranks: Leader | None = None,
    share: Share = WHOLE,
) -> Engine:
    """The engine of a whole chain in this process, divided over `ranks` if there are any; of the target alone where it
    evicts KV. `share`: the part of the device that it may take. Without `self_drafter` the retrieval tier shares the
    target's weights. Without `drafter`, where the settings name a model for it, drafts come from prompt lookup alone.
    """
    if settings.target.lossy:
        forgetful = lossy_kv(target, settings)
        return target_engine(target, settings, NothingBelow(), forgetful, kv=forgetful)
    own = target if self_drafter is None else self_drafter
    small, drafts = retrieval_kv(own, settings), drafter_for(settings, drafter)
    shared: RetrievalKV | LeadingRetrievalKV = small
    if ranks is not None:
        ranks.barrier()
        shared = LeadingRetrievalKV(small, ranks)  # each rank keeps its own share of every snapshot
    below = retrieval_decoder(own, shared, drafts, settings)
    # The target's pool is made last: its size is what the others have left.
    full = target_kv(target, settings, share, ranks)
    whole = full if ranks is None else LeadingFullKV(full, ranks, gathered=False)
    return target_engine(target, settings, below, shared, kv=whole)
