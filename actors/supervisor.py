"""Keeps a pipeline's target alive: watches it, and replaces its process in place if it dies or hangs. The drafting
tiers, the placement group and the owner of the pipeline stay as they are.
docs/decisions/0027-target-replaced-in-place.md
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from actors.pipeline import Pipeline
from actors.running_target import RunningTarget, TargetProcess
from actors.warm_up import warm_up_again
from triforce_core.config import Settings
from triforce_core.errors import TriForceError, UnavailableError

log = logging.getLogger("ray.serve")  # operators read this logger's files first

LOOK_EVERY_S = 1.0
ANSWER_S, UNANSWERED = 10.0, 2  # one late answer shows a busy machine, two in a row a process that hangs
PROCESS_S = 60.0  # limit for Ray to start the new process
# A start counts as hung once it has taken longer than LOAD_S and longer than LOAD_PATIENCE times the first start.
LOAD_S, LOAD_PATIENCE = 120.0, 5.0
MAX_FAILURES = 3  # starts in a row of a target that did not come to serve; then the pipeline is given up
RETRY_S = 0.2
FAILURES = (RayError, TriForceError, TimeoutError, OSError)  # of a start


class Supervisor:
    """Watches the target of a pipeline that serves, for as long as `run` runs."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self.pipeline, self.settings = pipeline, settings
        self.load_limit_s = max(LOAD_S, LOAD_PATIENCE * pipeline.load_s)
        pipeline.doubted = asyncio.Event()

    async def run(self) -> None:
        """Returns once the target could not be replaced: then the pipeline is stopped."""
        try:
            await self._watch()
        except Exception:  # an error of ours: without its supervisor the pipeline must not go on
            log.exception("the supervisor of the target failed")
            await self.pipeline.stop("the target is not watched any more")  # the text goes to clients

    async def _watch(self) -> None:
        doubted = self.pipeline.doubted
        assert doubted is not None
        while not self.pipeline.stopped:
            with suppress(TimeoutError):
                await asyncio.wait_for(doubted.wait(), LOOK_EVERY_S)
            doubted.clear()
            fault = await self._fault()
            if fault and not self.pipeline.stopped:
                await self._replace(fault)
            self.pipeline.serving.set()

    async def _fault(self) -> str:
        """What is wrong with the target; empty if it can serve."""
        target = self.pipeline.target
        assert target is not None
        until, unanswered, not_ready = time.monotonic() + UNANSWERED * ANSWER_S, 0, 0
        while not target.process.dead:
            try:
                status = await target.status(ANSWER_S)
            except UnavailableError:
                # A broken connection is no sign of a hang: it is made anew within seconds, and a process that is ending
                # breaks its connection before it has ended.
                unanswered += 1
                hidden = target.process.process is None
                if unanswered >= UNANSWERED and (hidden or time.monotonic() >= until):
                    return f"it answered none of {unanswered} questions"
                await asyncio.sleep(RETRY_S)
                continue
            not_ready += 1
            if status.ready or not_ready == UNANSWERED:
                return "" if status.ready else "its engine has failed, or hangs"
            await asyncio.sleep(LOOK_EVERY_S)  # a machine that was frozen in mid-pass ends that pass soon
        return "its process has ended"

    async def _replace(self, fault: str) -> None:
        """Kill what is left of the target and start it anew; after `MAX_FAILURES` failed starts stop the pipeline."""
        pipeline, began = self.pipeline, time.monotonic()
        pipeline.serving.clear()
        old = pipeline.target
        assert old is not None
        process, pid = old.process, old.pid
        for failures in range(1, MAX_FAILURES + 1):
            log.warning("the target (process %d) is replaced: %s", pid, fault)
            await self._end(process)
            try:
                pid = await asyncio.wait_for(self._new_process(pid), PROCESS_S)
                process = TargetProcess.of(pid)
                async with asyncio.timeout(self.load_limit_s):
                    await self._start(pid)
            except FAILURES as error:
                fault = f"start {failures} of {MAX_FAILURES} in a row failed: {error!r}"
                log.warning("the target does not come up: %s", fault)
                continue
            pipeline.restarts += 1
            await old.close()
            log.warning("the target was replaced by process %d in %.1f s", pid, time.monotonic() - began)
            return
        await pipeline.stop(f"the target tier does not come up: {fault}")

    async def _end(self, process: TargetProcess) -> None:
        """End the process and its followers, by Ray only if unseen, because Ray takes seconds to end one that hangs."""
        if process.process is None:
            ray.kill(self.pipeline.actors.target, no_restart=False)
        process.kill()

    async def _new_process(self, old: int) -> int:
        """The id of the process that Ray has started after `old`."""
        while True:
            with suppress(RayError):  # Ray has not noticed yet, or is starting it
                pid, *_ = await self.pipeline.actors.target.identity.remote()
                if pid != old:
                    return int(pid)
            await asyncio.sleep(RETRY_S)

    async def _start(self, pid: int) -> None:
        """Load and warm up the new process, which then is the pipeline's target."""
        target: Any = await RunningTarget.started(self.pipeline.actors.target)
        try:
            if target.pid != pid:
                raise UnavailableError(f"process {pid} ended while it was started")
            await warm_up_again(self.pipeline, target, self.settings)
        except BaseException:
            await target.close()
            raise
        self.pipeline.target = target
