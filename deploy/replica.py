"""A replica owns one pipeline, whose tier actors live in the replica's placement group and die with the replica.
If the pipeline's target dies, the target alone is replaced.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import Context
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.util import get_current_placement_group

from actors.pipeline import Pipeline
from actors.supervisor import Supervisor
from actors.warm_up import warm_up
from actors.wire import is_notice
from deploy.circuit_breaker import NONE, Avoid, CircuitBreaker
from deploy.errors import OtherFingerprintError, ReplicaError
from deploy.routing import Route
from deploy.serve_setup import stay_on_loopback
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.errors import FingerprintError, TriForceError, UnavailableError

log = logging.getLogger("ray.serve")

PING_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 4.0


class PipelineReplica:
    """The Serve deployment of one pipeline. Messages pass as bytes: Ray cannot pickle protobuf's."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        stay_on_loopback()
        group = get_current_placement_group()
        assert group is not None, "deployed with a bundle for each of the pipeline's processes"
        self.pipeline = await Pipeline.start(settings, group)
        await warm_up(self.pipeline, settings)
        # With several replicas, a request that comes while the target is replaced is better off at another one.
        self.pipeline.patient = settings.server.replicas.max == 1
        self.supervising = asyncio.create_task(Supervisor(self.pipeline, settings).run(), name="supervisor")

    async def decode(self, request: bytes, route: Route, avoid: Avoid = NONE) -> AsyncIterator[bytes]:
        """Takes a DecodeRequest and yields DecodeEvents; cancelling the call stops the request.

        `route` and `avoid` are used by the router only. Raises `ReplicaError` or `OtherFingerprintError`.
        """
        name = serve.get_replica_context().replica_id.unique_id
        try:
            async with self.pipeline.reached(request) as (target, asked), aclosing(target.decode(asked)) as events:
                async for event in events:
                    yield event
        except UnavailableError as error:
            raise ReplicaError(str(error), name, suspect=error.suspect) from None
        except FingerprintError as error:
            raise OtherFingerprintError(str(error), name) from None

    async def status(self) -> tuple[str, list[bytes]]:
        """This replica's name, and a TierStatus of each tier, draft first."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, [status.SerializeToString() for status in await self.pipeline.status()]

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica and its pipeline when this check has failed often enough.

        The check does not fail when the target dies or hangs, because the target is replaced in place. It fails when
        the new target does not come up; the pipeline is then stopped, so that no request waits for it.
        """
        if self.supervising.done():
            await self.pipeline.stop()
            raise UnavailableError(self.pipeline.stopped)

    async def ping(self) -> None:
        """A health check for clients. Its failures are not counted, because clients may call it at any rate."""
        await self.pipeline.check(PING_TIMEOUT_S)

    async def __del__(self) -> None:
        if hasattr(self, "supervising"):
            self.supervising.cancel()
        if hasattr(self, "pipeline"):
            await self.pipeline.stop()


class RemotePipelines:
    """The replicas as `Pipelines` of `deploy.service`. Ray's errors for a lost replica become `UnavailableError`."""

    def __init__(self, handle: DeploymentHandle[Any], settings: Settings) -> None:
        # The selector, and whether the retrieval tier may draft, for requests that do not say.
        self.selector, self.retrieves = settings.retrieval.selector, retrieves_by_default(settings)
        self.chunk = settings.retrieval.chunk
        self.shares = settings.target.prefix_cache and not settings.deterministic and not settings.target.lossy
        self.streaming = handle.options(stream=True)
        self.breaker = CircuitBreaker()
        # Status and health calls use a second handle, which has a second router; `options` makes that router at once.
        # If `PrefixRouter` counted these calls with the requests, a busy replica, which answers them late, would seem
        # busier still.
        control: DeploymentHandle[Any] = serve.get_deployment_handle(handle.deployment_name, handle.app_name)
        self.control = control.options()

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        avoid = self.breaker.avoid(request.fingerprint)
        shares = self.shares and not reads_all(request, self.selector, retrieves=self.retrieves)
        route = Route(request.prompt_token_ids, request.cache_salt) if shares else Route()
        # Called in a new context, so that Serve gives the call a new id. Otherwise all calls for one client request
        # would share its id, and of the calls with one id that wait for a replica, Serve's router loses all but one.
        sent = request.SerializeToString()
        response: Any = Context().run(self.streaming.decode.remote, sent, route=route, avoid=avoid)
        output = [*request.resume_token_ids]
        entered = answered = False  # both stay false for an output that was already complete: it has no pass
        try:
            async for data in response:
                event = pb.DecodeEvent.FromString(data)
                output += event.token_ids
                entered |= event.entered
                if event.entered:
                    cached = event.cached_tokens
                if entered and not answered and not is_notice(event):
                    answered = True
                    route.answered(cached + self.chunk)  # it finds whole chunks only
                yield event
        except Exception as error:
            found = lost(error)
            self.breaker.failed(found, request.fingerprint)
            raise found from error
        finally:
            response.cancel()
            if answered:
                route.ended(output)

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        """The tiers' status by replica, of those replicas that answer: one may be shutting down."""
        replicas = await self._ask_all("status")
        return {name: [pb.TierStatus.FromString(status) for status in tiers] for name, tiers in sorted(replicas)}

    async def check(self) -> None:
        """Raise `UnavailableError` unless a replica can serve."""
        try:  # ask the replica that Serve chooses; the timeout is needed because Serve waits if there is no replica
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self.control.ping.remote()
        except Exception as error:
            log.info("a replica cannot serve: %s", lost(error))
            if not await self._ask_all("ping", first=True):
                raise UnavailableError("no replica can serve") from None

    async def _ask_all(self, question: str, *, first: bool = False) -> list[Any]:
        """The answers of those replicas that answer in time; with `first`, no more than the first of them."""
        deadline = asyncio.get_running_loop().time() + ASK_TIMEOUT_S

        async def answer_of(replica: Any) -> Any:
            try:
                async with asyncio.timeout_at(deadline):
                    return await replica.get_async()
            except Exception as error:
                return lost(error)
            except asyncio.CancelledError as error:  # the call was cancelled there, or is not waited for any more
                return error

        # Ray's `results_async` has one timeout for all replicas: if one is silent, all answers are lost. This method is
        # private: it is looked up outside the `try`, so that it fails loudly where another version of Ray lacks it.
        replicas_of = DeploymentBroadcastResponse._fetch_replica_results_async
        try:
            async with asyncio.timeout_at(deadline):
                asked = await replicas_of(self.control.broadcast(question))
        except Exception as error:
            log.warning("no replica could be asked for %s: %r", question, error)
            return []
        waiting, answers = [asyncio.create_task(answer_of(replica)) for replica in asked], list[Any]()
        try:
            for answered in asyncio.as_completed(waiting):
                answer = await answered
                if isinstance(answer, BaseException):
                    log.info("one of %d replicas did not answer %s: %r", len(asked), question, answer)
                    continue
                answers.append(answer)
                if first:
                    break
        finally:
            for task in waiting:
                task.cancel()
        return answers


def reads_all(request: pb.DecodeRequest, selector: str, *, retrieves: bool) -> bool:
    """Whether a request needs passes over its whole prompt; `selector` and `retrieves` hold if it does not say."""
    if request.HasField("lookaheads"):
        retrieves = request.lookaheads.values[0] > 0
    return (retrieves and (request.selector or selector) == "h2o") or request.HasField("prompt_logprobs")


def retrieves_by_default(settings: Settings) -> bool:
    return settings.controlled or settings.speculation.effective[0] > 0


def lost(error: Exception) -> Exception:
    """The error to raise to callers in place of `error`."""
    cause = getattr(error, "cause", None)  # of what the replica raised: a Ray error, whose text is a traceback
    for each in (cause, error):
        if isinstance(each, TriForceError):
            return each
    if isinstance(error, ray.exceptions.RayTaskError):  # an error in the replica's own code
        return error
    if isinstance(error, ray.exceptions.RayError | RayServeException):
        return UnavailableError("the replica that served the request is gone; try again")
    return error
