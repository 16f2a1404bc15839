"""The engine: submit → collect → advance, over all live requests at once."""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from triforce_core.doorbell import Doorbell
from triforce_core.engine.controller import Controller, plan_of, recent_cut
from triforce_core.engine.freshness import SinceCut, has_sagged
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import FinishReason, Output, Request, Sequence, Totals
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot, SnapshotSink
from triforce_core.messages import Proposal, Proposer, SequenceSpec, Tally, Work
from triforce_core.plans import Plan
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.lookup import Shadow

log = logging.getLogger(__name__)

MOST_FAILURES = 5  # requests that failed alone, with none that ended well between: then the fault is the engine's


class SnapshotSource(Protocol):
    """The part of the target's KV cache that cuts snapshots; see kv/full.py."""

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot: ...


class SnapshotSchedule:
    """Decides when a snapshot is cut: chunks of tokens are selected again every `refresh_every` committed tokens, and
    sooner if the retrieval tier asks, or if clearly less of what it drafts is accepted than right after the last cut.
    `sink` takes the snapshots to the retrieval tier.
    """

    def __init__(
        self, kv: SnapshotSource, sink: SnapshotSink, chunks: ChunkSettings, selector: str, refresh_every: int
    ) -> None:
        """`selector`: a key of `SELECTORS`, for requests that name none."""
        self.kv, self.sink, self.chunks, self.selector = kv, sink, chunks, selector
        self.refresh_every = refresh_every

    def update(self, sequence: Sequence, *, wanted: bool) -> bool:
        """Cut and send a snapshot if one is due, and return whether it was: the sequence has none, the last one is old,
        or held only changes and was lost or refused, or clearly fewer drafts are accepted than right after it, or it is
        `wanted` by the retrieval tier. None is due while the sink is busy, or the sequence's plan leaves the retrieval
        tier out.
        """
        sequence_id, last = sequence.sequence_id, sequence.last_cut
        if not sequence.plan.retrieval or self.sink.busy(sequence_id):
            return False
        position = len(sequence.tokens) - 1  # the newest token has no KV yet
        base = self.sink.confirmed(sequence_id)
        # The last snapshot stated only changes to an earlier one, its base, and is not confirmed: it was lost or
        # refused, and the retrieval tier may lack the base. The next one must be whole.
        lost = last is not None and last.has_base and base != last.version
        whole = wanted or lost
        since = sequence.since_cut
        old = last is None or position - last.position >= self.refresh_every
        if whole or old or has_sagged(since.first, since.later):
            selector = SELECTORS[sequence.spec.selector]()
            snapshot = self.kv.cut(sequence_id, position, self.chunks, selector, 0 if whole else base)
            sequence.last_cut, sequence.since_cut = snapshot.record, SinceCut()
            sequence.stats.snapshots += 1
            self.sink.deliver(snapshot)
            return True
        return False

    def saw(self, sequence: Sequence, tally: Tally) -> None:
        """Count how many tokens of the retrieval tier the target accepted in a round. The first `refresh_every` / 4
        judged tokens show the acceptance with a fresh snapshot; rounds before it has arrived were drafted with the
        previous one.
        """
        if not self.arrived(sequence):
            return
        sequence.since_cut.add(tally, self.refresh_every // 4)

    def arrived(self, sequence: Sequence) -> bool:
        """Whether the retrieval tier has the latest snapshot."""
        last = sequence.last_cut
        return last is not None and self.sink.confirmed(sequence.sequence_id) == last.version

    def comes(self, sequence: Sequence) -> bool:
        """Whether the latest snapshot is still to arrive. Where it was lost, the retrieval tier asks for another."""
        return not self.arrived(sequence) and self.sink.busy(sequence.sequence_id)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's figures at the end of a turn."""

    kv_tokens: int = 0  # of the KV pool, those that requests use
    kept_tokens: int = 0  # those kept for later requests
    dropped_tokens: int = 0  # those that were kept and have been dropped, so far
    least_stall_s: float = 0.0  # see `Scheduler.least_stall_s`; 0 until a prompt has shown it
    totals: Totals = field(default_factory=Totals)


class Engine:
    """The loop over live requests. One thread calls `run_once`; any thread may call `submit` and `cancel`.

    `decoder` is the whole chain: its first level is the target, which hands up one verified block per round. Sequence
    ids count up from `first_sequence_id`; the tiers may still hold those of an earlier engine, which must not come
    again.
    """

    def __init__(
        self,
        decoder: Proposer,
        scheduler: Scheduler,
        snapshots: SnapshotSchedule,
        limits: Limits,
        first_sequence_id: int = 1,
        doorbell: Doorbell | None = None,
        controller: Controller | None = None,
        inexact: str = "",
    ) -> None:
        """`controller`: plans requests that set no lookaheads; without it they are decoded plainly. `inexact`: why the
        bits of a token depend on the pass (building/exactness.py); "": they do not.
        """
        self.decoder, self.scheduler, self.snapshots, self.limits = decoder, scheduler, snapshots, limits
        self.controller, self.inexact = controller, inexact
        self.ids = itertools.count(first_sequence_id)
        self.lock = threading.Lock()
        self.arrivals: deque[Sequence] = deque()
        self.cancelled: deque[int] = deque()
        self.due_for_snapshot: dict[int, bool] = {}  # sequences with new tokens → whether a snapshot was asked for
        self.doorbell = doorbell or Doorbell()
        self.totals = Totals()
        # Whether an error in work on one request ends that request, with the reason `failed`, in place of being raised.
        # An error in a pass is always raised.
        self.ends_alone, self.failures = False, 0
        # Called before a request's first pass with its id, as `submit` returns it, and with its `Stats.cached_tokens`.
        self.on_entering: Callable[[int, int], None] = lambda sequence_id, cached_tokens: None
        # For other threads to read: the scheduler's figure of this name in the present turn, and the latest status.
        self.asked_tokens, self.status = 0, EngineStatus()
        self.least_stall_s = 0.0  # as of the latest prompt chunk
        self.working_on: Callable[[list[int]], None] = lambda request_ids: None

    def watch(self, working_on: Callable[[list[int]], None]) -> None:
        """From now on, before each verifying pass of this process and each possible snapshot cut, `working_on` is
        called with the ids of the requests concerned; afterwards it is called with an empty list.
        """

        def passing(sequence_ids: list[int]) -> None:
            live = self.scheduler.live
            working_on([live[i].request_id for i in sequence_ids if i in live])

        self.working_on, level = working_on, self.decoder
        while isinstance(level, SpeculativeDecoder):
            level.passing, level = passing, level.proposer

    # -- from any thread -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id, that of its first `Sequence`. Raises `InvalidValueError` or a subclass."""
        self.limits.check(request)
        retrieves = request.lookaheads is None or request.lookaheads[0] > 0
        spec = SequenceSpec(
            sampling=request.sampling,
            seed=request.seed,
            prompt_length=len(request.prompt),
            max_length=len(request.prompt) + request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            grammar=request.grammar,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            # Requests without the retrieval tier get no snapshot, so nothing need be kept for one.
            selector=request.selector or self.snapshots.selector if retrieves else "streaming",
            cache_salt=request.cache_salt,
        )
        deadline = math.inf if request.timeout_s is None else time.perf_counter() + request.timeout_s
        with self.lock:
            sequence = Sequence(next(self.ids), request, spec, [*request.prompt, *request.resume], deadline=deadline)
            self.arrivals.append(sequence)
        self.doorbell.ring()
        return sequence.sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Stop a request, whose last output has the reason `cancelled`. Unknown and finished ids are ignored."""
        self.cancelled.append(sequence_id)
        self.doorbell.ring()

    @property
    def num_waiting(self) -> int:
        """The requests that wait for room, those that were preempted included."""
        return len(self.arrivals) + len(self.scheduler.queue)

    # -- from the thread that runs the loop ----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.scheduler.live or self.scheduler.queue or self.arrivals or self.cancelled)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a request or a cancellation comes, at most `timeout_s` seconds; not at all if there is work."""
        if self.idle:
            self.doorbell.wait(timeout_s)

    def run_once(self, timeout_s: float = 1.0) -> list[Output]:
        """One turn of the loop; waits for the tiers below as `SpeculativeDecoder.advance` does."""
        outputs = self._take_messages() + self._update_snapshots()
        self._make_room()
        self.scheduler.admit()
        work = self.scheduler.next_work()
        self._tell_entering(work)
        self.decoder.submit(work)
        self.asked_tokens = self.scheduler.asked_tokens
        proposals = self.decoder.collect(timeout_s)
        answers = [(live, p) for p in proposals if (live := self.scheduler.live.get(p.sequence_id))]
        if self.controller is not None:
            self.controller.passed(answers, self.scheduler.decoding, time.perf_counter())
        for sequence, proposal in answers:
            with self._alone(sequence, outputs):
                if output := self._advance(sequence, proposal):
                    outputs.append(output)
        kv = self.scheduler.kv
        self.status = EngineStatus(
            kv.used_tokens, kv.kept_tokens, kv.dropped_tokens, self.least_stall_s, self.totals.copy()
        )
        return outputs

    @contextmanager
    def _alone(self, sequence: Sequence, outputs: list[Output]) -> Iterator[None]:
        """An error in the block, which works on this sequence alone, ends its request alone if `ends_alone` is set."""
        try:
            yield
        except Exception:
            self.failures += 1
            if not self.ends_alone or self.failures >= MOST_FAILURES:
                raise
            log.exception("request %d failed", sequence.request_id)
            outputs.append(self._end(sequence, FinishReason.FAILED))

    def _take_messages(self) -> list[Output]:
        outputs = list[Output]()
        # The cancellations are read before the arrivals. A request is submitted before it is cancelled, so every
        # request that is cancelled here is known by then.
        cancelled = [self.cancelled.popleft() for _ in range(len(self.cancelled))]
        while self.arrivals:
            sequence = self.arrivals.popleft()
            if sequence.request.resume and (reason := self._finish_reason(sequence)):  # the resumed output is complete
                outputs.append(Output(sequence.request_id, (), b"", reason, sequence.stats))
            else:
                with self._alone(sequence, outputs):
                    self.scheduler.add(sequence)
        for request_id in cancelled:
            if found := self.scheduler.find(request_id):
                outputs.append(self._end(found, FinishReason.CANCELLED))
        now = time.perf_counter()
        for sequence in [*self.scheduler.live.values(), *self.scheduler.queue]:
            if sequence.deadline < now:
                outputs.append(self._end(sequence, FinishReason.DEADLINE))
        return outputs

    def _tell_entering(self, work: list[Work]) -> None:
        """Report the requests whose first pass begins: only those are suspects if a pass kills the process."""
        for each in work:
            sequence = self.scheduler.live[each.span.sequence_id]
            if not sequence.entered:
                sequence.entered = True
                self.on_entering(sequence.request_id, sequence.stats.cached_tokens)

    def _end(self, sequence: Sequence, reason: FinishReason) -> Output:
        """End a request before its output is complete."""
        self._drop(sequence)
        return Output(sequence.request_id, (), b"", reason, sequence.stats)

    def _drop(self, sequence: Sequence) -> None:
        """Forget a request here and at every tier. Its slots are free at once."""
        live = sequence.sequence_id in self.scheduler.live
        self.scheduler.remove(sequence)
        if live:
            self.decoder.release([sequence.sequence_id])

    def _make_room(self) -> None:
        """Preempt requests until those that remain have room for their next round."""
        while sequence := self.scheduler.to_preempt():
            self._drop(sequence)
            self.totals.stats.preempted += 1
            self.scheduler.add(sequence.again(next(self.ids)))

    def _update_snapshots(self) -> list[Output]:
        """Update snapshots for the tokens that the last turn committed: only now, so that users get these first."""
        outputs = list[Output]()
        for sequence_id, wanted in self.due_for_snapshot.items():
            if sequence := self.scheduler.live.get(sequence_id):
                self.working_on([sequence.request_id])
                with self._alone(sequence, outputs):
                    self._update_snapshot(sequence, wanted=wanted)
                self.working_on([])
        self.due_for_snapshot.clear()
        return outputs

    def _update_snapshot(self, sequence: Sequence, *, wanted: bool) -> None:
        """Cut a snapshot if one is due. A request whose plan begins to need one waits for it, decoding plainly."""
        needs = self.controller is not None and sequence.plan.retrieval > 0
        first = needs and not recent_cut(sequence, self.snapshots.refresh_every)
        began = time.perf_counter()
        cut = self.snapshots.update(sequence, wanted=wanted)
        seconds = time.perf_counter() - began
        if cut:
            self.totals.stats.snapshots += 1
        if cut and first and self.controller is not None:
            for live in self.scheduler.live.values():
                live.apart_s += seconds
                self.controller.was_cut(live, seconds)
        waits = needs and sequence.request.lookaheads is None and (first or sequence.plan_waits)
        sequence.plan_waits = waits and self.snapshots.comes(sequence)

    def _advance(self, sequence: Sequence, proposal: Proposal) -> Output | None:
        """Apply the target's answer: a prefill chunk is done, or tokens are committed."""
        work, sequence.work = sequence.work, None
        assert work is not None, "the decoder answers what it was asked"
        stats, prefilling = sequence.stats, sequence.prefilling
        if prefilling:
            stats.prefill_s += sequence.lap()
            self.least_stall_s = self.scheduler.least_stall_s(self.limits.context_length)
        if not work.sample:
            assert proposal.missing_from is None, "the target holds what it was told"
            sequence.prefilled = proposal.start
            return self._output(sequence, proposal, None) if proposal.prompt_logprobs else None
        if any(work.lookaheads[1:]):
            sequence.stated = len(sequence.tokens) if proposal.missing_from is None else proposal.missing_from
        if sequence.has_output:
            stats.decoded += 0 if prefilling else len(proposal.tokens)  # a preempted request was prefilled again
        elif not sequence.request.resume:  # a request that goes on was counted when it first came
            self.totals.read(stats.cached_tokens, sequence.given - stats.cached_tokens)
        sequence.tokens += proposal.tokens
        sequence.prefilled = len(sequence.tokens) - 1
        stalled_s, apart_s, sequence.stalled_s, sequence.apart_s = sequence.stalled_s, sequence.apart_s, 0.0, 0.0
        if not prefilling:
            round_s = sequence.lap()
            stats.decode_s += round_s
            plan = plan_of(work)
            stats.add(plan, proposal.tallies)
            if plan.retrieval:
                self.snapshots.saw(sequence, proposal.tallies[0])
            self.totals.add(plan, proposal.tallies, len(proposal.tokens))
            sequence.round_s = max(0.0, round_s - stalled_s)
            if self.controller is not None and sequence.request.lookaheads is None:
                undisturbed_s = None if stalled_s else round_s - apart_s
                if self.controller.looks_up:
                    proposal = scored(sequence, proposal, plan)
                self.controller.learn(sequence, proposal, plan, undisturbed_s)
        reason = FinishReason.NO_TOKEN if proposal.no_token else self._finish_reason(sequence)
        if reason is None:
            if self.controller is not None and sequence.request.lookaheads is None:
                sequence.plan = self.controller.plan(self.scheduler.decoding)
            self.due_for_snapshot[sequence.sequence_id] = proposal.snapshot_wanted
        else:
            self._drop(sequence)
            self.failures = 0
        return self._output(sequence, proposal, reason)

    @staticmethod
    def _output(sequence: Sequence, proposal: Proposal, reason: FinishReason | None) -> Output:
        return Output(
            sequence.request_id,
            proposal.tokens,
            proposal.origins,
            reason,
            sequence.stats.copy(),
            proposal.logprobs,
            sequence.unreported(proposal.prompt_logprobs),
        )

    @staticmethod
    def _finish_reason(sequence: Sequence) -> FinishReason | None:
        if sequence.tokens[-1] in sequence.spec.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.spec.max_length else None


def run_to_end(engine: Engine, requests: list[Request]) -> Iterator[Output]:
    """Submit requests and run the loop until all have finished, yielding outputs as tokens are committed."""
    left = {engine.submit(request) for request in requests}
    while left:
        for output in engine.run_once():
            if output.finish_reason:
                left.discard(output.sequence_id)
            yield output


def scored(sequence: Sequence, proposal: Proposal, plan: Plan) -> Proposal:
    """The answer to a round, with the score that prompt lookup would have had where the draft tier was not asked."""
    if plan.draft:  # the draft tier scores
        if sequence.shadow:
            sequence.shadow.forget()
        return proposal
    shadow = sequence.shadow = sequence.shadow or Shadow(sequence.spec)
    if not shadow.due(len(sequence.tokens)):
        return proposal  # most plain rounds: they should cost hardly more than without a controller
    # The first score reads the whole prompt, about 1 ms at 128,000 tokens, and counts as part of the next round.
    score = shadow.score(sequence.tokens)
    target, below, leaf = (*proposal.tallies, Tally(), Tally(), Tally())[:3]
    return replace(proposal, tallies=(target, below, leaf + score))
