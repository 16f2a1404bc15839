from triforce_core._gen.triforce.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkBatch(_message.Message):
    __slots__ = ("work", "release")
    WORK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    work: _containers.RepeatedCompositeFieldContainer[Work]
    release: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, work: _Optional[_Iterable[_Union[Work, _Mapping]]] = ..., release: _Optional[_Iterable[int]] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("span", "lookaheads", "sample", "drafting", "nodes", "least_gain")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEADS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LEAST_GAIN_FIELD_NUMBER: _ClassVar[int]
    span: Span
    lookaheads: _containers.RepeatedScalarFieldContainer[int]
    sample: bool
    drafting: int
    nodes: int
    least_gain: float
    def __init__(self, span: _Optional[_Union[Span, _Mapping]] = ..., lookaheads: _Optional[_Iterable[int]] = ..., sample: _Optional[bool] = ..., drafting: _Optional[int] = ..., nodes: _Optional[int] = ..., least_gain: _Optional[float] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("sequence_id", "start", "tokens", "spec")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    spec: SequenceSpec
    def __init__(self, sequence_id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., spec: _Optional[_Union[SequenceSpec, _Mapping]] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("sampling", "seed", "prompt_length", "max_length", "stop_token_ids", "grammar")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    sampling: _generation_pb2.Sampling
    seed: int
    prompt_length: int
    max_length: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    def __init__(self, sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., prompt_length: _Optional[int] = ..., max_length: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ...) -> None: ...

class ProposalBatch(_message.Message):
    __slots__ = ("proposals",)
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    def __init__(self, proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("sequence_id", "start", "tokens", "origins", "missing_from", "snapshot_wanted", "tallies", "parents")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FROM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WANTED_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    origins: bytes
    missing_from: int
    snapshot_wanted: bool
    tallies: _containers.RepeatedCompositeFieldContainer[Tally]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., origins: _Optional[bytes] = ..., missing_from: _Optional[int] = ..., snapshot_wanted: _Optional[bool] = ..., tallies: _Optional[_Iterable[_Union[Tally, _Mapping]]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("rounds", "proposed", "accepted", "rejected", "lookup_accepted", "lookup_rejected", "passes", "busy_s", "drafts")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_REJECTED_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    proposed: int
    accepted: int
    rejected: int
    lookup_accepted: int
    lookup_rejected: int
    passes: int
    busy_s: float
    drafts: int
    def __init__(self, rounds: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., rejected: _Optional[int] = ..., lookup_accepted: _Optional[int] = ..., lookup_rejected: _Optional[int] = ..., passes: _Optional[int] = ..., busy_s: _Optional[float] = ..., drafts: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "resume_token_ids", "sampling", "seed", "max_tokens", "stop_token_ids", "lookaheads", "grammar", "logprobs", "prompt_logprobs", "priority", "timeout_s", "drafting", "selector", "cache_salt", "fingerprint", "stats_in_each")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEADS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STATS_IN_EACH_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.Sampling
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    lookaheads: _generation_pb2.Lookaheads
    grammar: str
    logprobs: int
    prompt_logprobs: int
    priority: int
    timeout_s: float
    drafting: int
    selector: str
    cache_salt: str
    fingerprint: str
    stats_in_each: bool
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., lookaheads: _Optional[_Union[_generation_pb2.Lookaheads, _Mapping]] = ..., grammar: _Optional[str] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., drafting: _Optional[int] = ..., selector: _Optional[str] = ..., cache_salt: _Optional[str] = ..., fingerprint: _Optional[str] = ..., stats_in_each: _Optional[bool] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("token_ids", "origins", "finish_reason", "stats", "logprobs", "prompt_logprobs", "no_token", "entered", "fingerprint", "cached_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: bytes
    finish_reason: _generation_pb2.FinishReason
    stats: DecodeStats
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    no_token: bool
    entered: bool
    fingerprint: str
    cached_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stats: _Optional[_Union[DecodeStats, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., no_token: _Optional[bool] = ..., entered: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeStats(_message.Message):
    __slots__ = ("queued_s", "prefill_s", "decode_s", "decoded", "snapshots", "tallies", "preempted", "plan", "plans", "plan_changes", "expected_ms", "plain_ms", "direct", "cached_tokens")
    class PlansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    PLAN_CHANGES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_MS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    prefill_s: float
    decode_s: float
    decoded: int
    snapshots: int
    tallies: _containers.RepeatedCompositeFieldContainer[Tally]
    preempted: int
    plan: str
    plans: _containers.ScalarMap[str, int]
    plan_changes: int
    expected_ms: float
    plain_ms: float
    direct: Tally
    cached_tokens: int
    def __init__(self, queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., decoded: _Optional[int] = ..., snapshots: _Optional[int] = ..., tallies: _Optional[_Iterable[_Union[Tally, _Mapping]]] = ..., preempted: _Optional[int] = ..., plan: _Optional[str] = ..., plans: _Optional[_Mapping[str, int]] = ..., plan_changes: _Optional[int] = ..., expected_ms: _Optional[float] = ..., plain_ms: _Optional[float] = ..., direct: _Optional[_Union[Tally, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "ready", "live_sequences", "links", "threads", "address", "silent", "audit", "least_stall_ms", "kv_tokens", "controller", "passes", "pass_s", "kv_pool_tokens", "waiting_sequences", "totals", "kernels", "fingerprint", "inexact", "restarts", "kept_tokens", "dropped_tokens", "refused_calls")
    TIER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    LEAST_STALL_MS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CALLS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    ready: bool
    live_sequences: int
    links: _containers.RepeatedCompositeFieldContainer[LinkCounters]
    threads: int
    address: str
    silent: SilentPeer
    audit: Audit
    least_stall_ms: float
    kv_tokens: int
    controller: ControllerStatus
    passes: int
    pass_s: float
    kv_pool_tokens: int
    waiting_sequences: int
    totals: Totals
    kernels: Kernels
    fingerprint: str
    inexact: str
    restarts: int
    kept_tokens: int
    dropped_tokens: int
    refused_calls: int
    def __init__(self, tier: _Optional[str] = ..., ready: _Optional[bool] = ..., live_sequences: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkCounters, _Mapping]]] = ..., threads: _Optional[int] = ..., address: _Optional[str] = ..., silent: _Optional[_Union[SilentPeer, _Mapping]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ..., least_stall_ms: _Optional[float] = ..., kv_tokens: _Optional[int] = ..., controller: _Optional[_Union[ControllerStatus, _Mapping]] = ..., passes: _Optional[int] = ..., pass_s: _Optional[float] = ..., kv_pool_tokens: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., kernels: _Optional[_Union[Kernels, _Mapping]] = ..., fingerprint: _Optional[str] = ..., inexact: _Optional[str] = ..., restarts: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., refused_calls: _Optional[int] = ...) -> None: ...

class Kernels(_message.Message):
    __slots__ = ("fused", "shapes")
    FUSED_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    fused: bool
    shapes: int
    def __init__(self, fused: _Optional[bool] = ..., shapes: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("tallies", "direct", "plans", "snapshots", "preempted", "rounds_by_tokens", "prefix_hit_tokens", "prefix_miss_tokens")
    class PlansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RoundsByTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tallies: _containers.RepeatedCompositeFieldContainer[Tally]
    direct: Tally
    plans: _containers.ScalarMap[str, int]
    snapshots: int
    preempted: int
    rounds_by_tokens: _containers.ScalarMap[int, int]
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    def __init__(self, tallies: _Optional[_Iterable[_Union[Tally, _Mapping]]] = ..., direct: _Optional[_Union[Tally, _Mapping]] = ..., plans: _Optional[_Mapping[str, int]] = ..., snapshots: _Optional[int] = ..., preempted: _Optional[int] = ..., rounds_by_tokens: _Optional[_Mapping[int, int]] = ..., prefix_hit_tokens: _Optional[int] = ..., prefix_miss_tokens: _Optional[int] = ...) -> None: ...

class ControllerStatus(_message.Message):
    __slots__ = ("latest", "plans", "corrections", "acceptance")
    class PlansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CorrectionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LATEST_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    latest: str
    plans: _containers.ScalarMap[str, int]
    corrections: _containers.ScalarMap[str, float]
    acceptance: _containers.RepeatedCompositeFieldContainer[KnownAcceptance]
    def __init__(self, latest: _Optional[str] = ..., plans: _Optional[_Mapping[str, int]] = ..., corrections: _Optional[_Mapping[str, float]] = ..., acceptance: _Optional[_Iterable[_Union[KnownAcceptance, _Mapping]]] = ...) -> None: ...

class KnownAcceptance(_message.Message):
    __slots__ = ("temperature", "retrieval", "lookup", "found", "lookup_first", "lookup_long", "accepted", "accepted_below", "steps", "steps_below")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIRST_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_LONG_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BELOW_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BELOW_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    retrieval: float
    lookup: float
    found: float
    lookup_first: float
    lookup_long: float
    accepted: float
    accepted_below: float
    steps: float
    steps_below: float
    def __init__(self, temperature: _Optional[float] = ..., retrieval: _Optional[float] = ..., lookup: _Optional[float] = ..., found: _Optional[float] = ..., lookup_first: _Optional[float] = ..., lookup_long: _Optional[float] = ..., accepted: _Optional[float] = ..., accepted_below: _Optional[float] = ..., steps: _Optional[float] = ..., steps_below: _Optional[float] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("rounding", "blocks", "tokens", "ties", "mismatches", "skipped", "largest_difference")
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    rounding: float
    blocks: int
    tokens: int
    ties: int
    mismatches: int
    skipped: int
    largest_difference: float
    def __init__(self, rounding: _Optional[float] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., ties: _Optional[int] = ..., mismatches: _Optional[int] = ..., skipped: _Optional[int] = ..., largest_difference: _Optional[float] = ...) -> None: ...

class SilentPeer(_message.Message):
    __slots__ = ("tier", "address", "silent_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    address: str
    silent_s: float
    def __init__(self, tier: _Optional[str] = ..., address: _Optional[str] = ..., silent_s: _Optional[float] = ...) -> None: ...

class LinkCounters(_message.Message):
    __slots__ = ("link", "work_items", "work_tokens", "proposals", "proposed_tokens", "bytes_in", "bytes_out")
    LINK_FIELD_NUMBER: _ClassVar[int]
    WORK_ITEMS_FIELD_NUMBER: _ClassVar[int]
    WORK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    link: str
    work_items: int
    work_tokens: int
    proposals: int
    proposed_tokens: int
    bytes_in: int
    bytes_out: int
    def __init__(self, link: _Optional[str] = ..., work_items: _Optional[int] = ..., work_tokens: _Optional[int] = ..., proposals: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ...) -> None: ...
