"""The CPU threads of a chain that is all in this process. actors/warm_up.py chooses those of tier actors."""

from collections.abc import Callable

from triforce_core.config import Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.inspection import runners_of
from triforce_core.engine.kept_threads import keep_threads, kept_threads
from triforce_core.engine.thread_search import Arrangement
from triforce_core.engine.warm_up import WarmUp
from triforce_core.models.runner import ModelRunner
from triforce_core.models.threads import ALL_THREADS


def choose_threads(engine: Engine, settings: Settings, report: Callable[[str], None]) -> None:
    """Set each runner's decoding threads, unless the settings fix them: to the numbers kept from an earlier run, or
    else by measuring now. `report` gets a line for the user when measuring starts.
    """
    if not settings.chooses_threads or ALL_THREADS == 1:
        return
    # Kept under the settings of a server with `colocate: all`: there, too, the tiers take turns in one process, while
    # tiers in processes of their own compete for cores.
    settings = settings.model_copy(update={"placement": settings.placement.model_copy(update={"colocate": "all"})})
    runners = {tier.name.lower(): runner for tier, runner in runners_of(engine).items()}
    kept = {tier: kept_threads(settings, tier) for tier in runners}
    known = {tier: threads for tier, threads in kept.items() if threads is not None}
    if len(known) < len(runners):
        report("choosing CPU threads, once for this machine and these models")
        known = searched(engine, settings, runners)
    for tier, threads in known.items():
        runners[tier].decode_on(threads)


def searched(engine: Engine, settings: Settings, runners: dict[str, ModelRunner]) -> Arrangement:
    """The fastest arrangement found within the time limit of the search; it is kept for the next run."""
    warming = WarmUp(settings, engine.limits, dict.fromkeys(runners, ALL_THREADS))
    for request in warming.requests():
        for output in run_to_end(engine, [request]):
            if not warming.round_ended(len(output.tokens)) and output.finish_reason is None:
                engine.cancel(output.sequence_id)
            for tier, threads in warming.threads.items():
                runners[tier].decode_on(threads)
    for tier, threads in warming.search.best.items():
        keep_threads(settings, tier, threads)
    return warming.search.best
