"""The target as a gRPC service from requests to committed tokens, and the thread that drives the engine."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

import grpc
import grpc.aio

from actors.admission import Address, TargetAdmission
from actors.encryption import serve_on
from actors.links import CHANNEL_OPTIONS
from actors.marks import SLOT, Marks
from actors.pass_times import PassTimes
from actors.wire import controller_to_proto, event_to_proto, request_from_proto, totals_to_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TargetServicer, add_TargetServicer_to_server
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import FinishReason, Output, Request
from triforce_core.errors import ContextLengthError, InvalidValueError, UnavailableError, require
from triforce_core.models.audit import AuditCounts
from triforce_core.sampling.grammars import Grammars

log = logging.getLogger(__name__)

SERVER_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.server.max_pending_requests", 10_000)]
POLL_S = 0.2
T = TypeVar("T")


class EngineThread:
    """Runs the engine's loop and hands each output to its request's callback, which must not block."""

    def __init__(self, engine: Engine, marks: Marks | None = None) -> None:
        """`marks`: where the requests are marked that the engine works on."""
        self.engine, self.marks = engine, marks
        self.callbacks: dict[int, Callable[[Output | None], None]] = {}
        self.slots: dict[int, int] = {}  # by sequence id, its number among the marks
        self.marked: list[int] = []  # the slots that are marked now
        self.entering: dict[int, Callable[[int], None]] = {}  # by sequence id, of requests whose first pass is to come
        self.lock = threading.Lock()
        self.failed: BaseException | None = None
        self.times = PassTimes()
        self.stopping = threading.Event()
        engine.on_entering, engine.ends_alone = self._enter, True
        if marks is not None:
            engine.watch(self._working_on)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(
        self,
        request: Request,
        callback: Callable[[Output | None], None],
        entering: Callable[[int], None] = lambda cached_tokens: None,
        slot: int | None = None,
    ) -> int:
        """Queue a request and return its sequence id. `callback` gets its outputs, and None if the engine fails;
        `entering` is called before the first pass over its tokens, with the number of its prompt's tokens whose KV was
        found. Neither may block. `slot` is its number among the marks. Raises `UnavailableError` if the engine has
        failed, and the errors of `Engine.submit`.
        """
        with self.lock:
            if self.failed is not None:
                raise UnavailableError("the target tier has failed")
            sequence_id = self.engine.submit(request)
            self.callbacks[sequence_id], self.entering[sequence_id] = callback, entering
            if slot is not None:
                self.slots[sequence_id] = slot
        return sequence_id

    @property
    def ready(self) -> bool:
        """Whether the engine runs and does not hang."""
        engine = self.engine
        hangs = self.times.hangs(engine.asked_tokens, engine.doorbell.woken)
        return self.failed is None and self.thread.is_alive() and not hangs

    def cancel(self, sequence_id: int) -> None:
        with self.lock:
            self.slots.pop(sequence_id, None)
            self.entering.pop(sequence_id, None)
            if self.callbacks.pop(sequence_id, None):
                self.engine.cancel(sequence_id)

    def _enter(self, sequence_id: int, cached_tokens: int) -> None:
        with self.lock:
            entering = self.entering.pop(sequence_id, None)
        if entering is not None:
            entering(cached_tokens)

    def _working_on(self, sequence_ids: list[int]) -> None:
        """Mark these requests, and these alone."""
        assert self.marks is not None
        self.marks.take_off(self.marked)
        self.marked = [slot for i in sequence_ids if (slot := self.slots.get(i)) is not None]
        self.marks.put(self.marked)

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.engine.wait(POLL_S)
                if not self.engine.idle:
                    self.times.begin()
                    self._dispatch(self.engine.run_once(POLL_S))
                    self.times.end(self.engine.asked_tokens, self.engine.doorbell.woken)
        except Exception as error:
            log.exception("the engine failed")
            with self.lock:
                self.failed = error
                callbacks, self.callbacks = list(self.callbacks.values()), {}
            for callback in callbacks:
                callback(None)

    def _dispatch(self, outputs: list[Output]) -> None:
        with self.lock:
            for output in outputs:
                last = output.finish_reason is not None
                callback = (
                    self.callbacks.pop(output.sequence_id, None) if last else self.callbacks.get(output.sequence_id)
                )
                if callback is not None:
                    callback(output)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(timeout=10)


class TargetServer(TargetServicer):
    """Token-level generation; see tiers.proto."""

    def __init__(
        self,
        engine: Engine,
        default_lookaheads: tuple[int, int] | None,
        grammars: Grammars | None = None,
        audit: AuditCounts | None = None,
        fingerprint: str = "",
        marks: Marks | None = None,
    ) -> None:
        """`grammars`: None: only requests without a grammar are served. `audit`: what the engine's audits find.
        `fingerprint`: what determines its tokens. `marks`: where it marks requests while it works on them.
        """
        self.engine_thread, self.default_lookaheads = EngineThread(engine, marks), default_lookaheads
        self.grammars, self.audit, self.fingerprint, self.marks = grammars, audit, fingerprint, marks

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DecodeEvent]:
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[Output | pb.DecodeEvent | None]()

        def deliver(output: Output | pb.DecodeEvent | None) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        if self.engine_thread.failed is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the target tier has failed")
        if request.fingerprint not in ("", self.fingerprint):
            reason = f"fingerprint: {request.fingerprint[:80]!r} is not what is served here, {self.fingerprint!r}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        try:
            slot = slot_of(context)
            wanted = request_from_proto(request, self.default_lookaheads)
            # Sent before any work is done for the request: so the caller can tell a target that died with the request,
            # be it while compiling its grammar, from one that never received it.
            yield pb.DecodeEvent(fingerprint=self.fingerprint)
            await self._compile(wanted.grammar, slot)
            sequence_id = self.engine_thread.submit(
                wanted, deliver, lambda cached: deliver(pb.DecodeEvent(entered=True, cached_tokens=cached)), slot
            )
        except ContextLengthError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        except InvalidValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        try:
            while True:
                output = await outputs.get()
                if isinstance(output, pb.DecodeEvent):
                    yield output
                    continue
                if output is None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the target tier has failed")
                if output.finish_reason is FinishReason.DEADLINE:
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"not done within {wanted.timeout_s:g} s")
                if output.finish_reason is FinishReason.FAILED:
                    await context.abort(grpc.StatusCode.INTERNAL, "the engine failed at this request")
                yield event_to_proto(output, stats=request.stats_in_each)
                if output.finish_reason:
                    return
        finally:
            self.engine_thread.cancel(sequence_id)

    async def _compile(self, grammar: str, slot: int | None) -> None:
        """Compile the request's grammar, if it has one, so that the engine finds it compiled."""
        if not grammar:
            return
        require(self.grammars is not None, "grammar", grammar, "is not supported here")
        assert self.grammars is not None
        compiling = [slot] if self.marks is not None and slot is not None else []
        if self.marks is not None:
            self.marks.put(compiling)
        try:
            compiled = await self.grammars.matcher(grammar)
        finally:  # also where the client leaves meanwhile
            if self.marks is not None:
                self.marks.take_off(compiling)
        require(not compiled.is_error(), "grammar", grammar, f"cannot be compiled: {compiled.get_error():.500}")

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.TierStatus:
        return self.status()

    def status(self) -> pb.TierStatus:
        engine = self.engine_thread.engine
        controller, status = engine.controller, engine.status
        return pb.TierStatus(
            tier="target",
            fingerprint=self.fingerprint,
            inexact=engine.inexact,
            ready=self.engine_thread.ready,
            live_sequences=len(self.engine_thread.callbacks),
            audit=pb.Audit(**asdict(self.audit)) if self.audit else None,
            least_stall_ms=1e3 * status.least_stall_s,
            kv_tokens=status.kv_tokens,
            kept_tokens=status.kept_tokens,
            dropped_tokens=status.dropped_tokens,
            kv_pool_tokens=engine.limits.kv_pool_tokens,
            waiting_sequences=engine.num_waiting,
            totals=totals_to_proto(status.totals),
            controller=controller_to_proto(controller.figures()) if controller else None,
        )

    def stop(self) -> None:
        self.engine_thread.stop()


def slot_of(context: grpc.aio.ServicerContext[Any, Any]) -> int | None:
    """The number by which the caller wants to find the request among the marks. Raises `InvalidValueError`."""
    given = next((str(value) for key, value in context.invocation_metadata() or () if key == SLOT), None)
    if given is None:
        return None
    require(given.isdecimal() and len(given) < 20, SLOT, given, "must be a number of at most 19 digits")
    return int(given)


class AsyncServer:
    """Serves the target on an event loop in a separate thread, so that its many streams never wait for the model."""

    def __init__(self, host: str, target_server: TargetServer) -> None:
        self.host, self.target_server = host, target_server
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="grpc", daemon=True)
        self.thread.start()
        try:
            self.admission = TargetAdmission()
            self.server, self.address = self._run(self._start())
        except Exception:
            self._end()
            raise

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)

    async def _start(self) -> tuple[grpc.aio.Server, Address]:
        server = grpc.aio.server(interceptors=[self.admission], options=SERVER_OPTIONS)
        add_TargetServicer_to_server(self.target_server, server)
        place = serve_on(server, self.host)
        await server.start()
        return server, Address(place, self.admission.secret)

    def stop(self, grace_s: float = 1.0) -> None:
        self._run(self.server.stop(grace_s))
        self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5)
