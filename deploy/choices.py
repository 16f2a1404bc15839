"""What a command chooses for its model where the settings do not say, by the model's configuration and the memory that
this machine has, and the line that says so. Not for a cluster: its nodes have other memory than the head.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from deploy.checks import weight_bytes
from deploy.service import served_name
from triforce_core.building.target_kv import HOST_PART, part_of
from triforce_core.config import Settings
from triforce_core.engine.limits import target_limits
from triforce_core.machine.device import DTYPES, torch_device
from triforce_core.machine.memory import HOST, free_bytes
from triforce_core.models.files import context_length, kv_shape, load_config
from triforce_core.models.longrope import is_long

# Of the memory that the weights leave: the most that one context takes, and the most that snapshots take.
GPU_PART, SNAPSHOT_PART = 0.75, 0.25
SNAPSHOTS = 2  # of a live request: one in the retrieval tier, and one on its way there
STEP = 1024  # a context that is lowered is a multiple of it, and at least one
CONTEXT_PER_BUDGET, MOST_BUDGET = 32, 4096  # TriForce's: 4K of 128K


def fitted(settings: Settings) -> Settings:
    """The settings with a context, a retrieval budget and a number of requests that suit the model and this machine, in
    place of those that are not set. Both must be resolved: dtype and placement.
    """
    config = load_config(settings.target.model, "target")
    layers, kv_heads, head_dim = kv_shape(config)
    token = 2 * layers * kv_heads * head_dim * DTYPES[settings.dtype].itemsize // settings.ranks(("target",))
    left, target, retrieval = memory_left(settings), settings.target, settings.retrieval
    context = target_limits(config, settings).context_length
    if target.context_length is None and target.offload == "none" and not target.lossy:
        part = GPU_PART if settings.device_type == "cuda" else HOST_PART
        least = STEP
        if is_long(config, context):  # a shorter context would take the frequencies for short texts: other tokens
            least += config.rope_parameters["original_max_position_embeddings"] // STEP * STEP
        context = min(context, max(least, int(left * part) // token // STEP * STEP))
    budget = retrieval.budget
    if "budget" not in retrieval.model_fields_set:
        wanted = min(MOST_BUDGET, context // CONTEXT_PER_BUDGET)
        budget = max(budget, wanted // retrieval.chunk * retrieval.chunk)
    together = settings.max_sequences
    if "max_sequences" not in settings.model_fields_set:
        together = max(1, min(together, int(left * SNAPSHOT_PART) // (SNAPSHOTS * budget * token)))
    return settings.model_copy(
        update={
            "target": target.model_copy(update={"context_length": context}),
            "retrieval": retrieval.model_copy(update={"budget": budget}),
            "max_sequences": together,
        }
    )


def memory_left(settings: Settings) -> int:
    """The bytes that weights leave of what the target's process may take, by what is free now."""
    place, weights = torch_device(settings.device), weight_bytes(settings)
    if place == HOST:
        free = free_bytes(place)
    else:  # to ask makes a CUDA context, which takes memory for as long as its process lives
        with ProcessPoolExecutor(1, get_context("spawn")) as child:
            free = child.submit(free_bytes, place).result()
    mine = weights[0] if settings.placement.groups[0].gpus else sum(weights)
    return max(0, int(free * part_of(settings)) - mine)


def line(given: Settings, chosen: Settings) -> str:
    """What is served, and with what; `given`: the settings before they were fitted."""
    own = context_length(load_config(given.target.model, "target"))
    context = chosen.target.context_length or own
    why = "as set" if given.target.context_length else "the model's own"
    if not given.target.context_length and context < own:
        why = f"of the model's {own:,}: free memory holds no more"
    drafter = {"ngram": "prompt lookup (draft.model names none)", "demo": "the demo pair's"}.get(given.draft.model)
    parts = {
        "drafter": "none" if given.target.lossy else drafter or given.draft.model,
        "context": f"{context:,} tokens ({why})",
        "retrieval budget": f"{chosen.retrieval.budget:,} tokens",
        "requests together": f"up to {chosen.max_sequences}",
    }
    return f"serving {served_name(chosen)}: {', '.join(f'{name} {value}' for name, value in parts.items())}"
