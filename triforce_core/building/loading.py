"""Loading the models that the settings name, after checking that they fit each other, for a chain or for one tier."""

from transformers import PreTrainedModel

from triforce_core.attention import check_kernel
from triforce_core.building.assembly import local_engine
from triforce_core.building.drafters import drafter_weights
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.errors import require
from triforce_core.machine.memory import WHOLE, Share
from triforce_core.models.files import check_pair, check_self_drafter, kv_shape, load_config
from triforce_core.models.load import load_model
from triforce_core.models.precision import resolved
from triforce_core.models.quantize import quantize_weights, quantized_copy
from triforce_core.models.rank_group import Group, Leader


def load_retrieval_model(settings: Settings, group: Group | None = None) -> PreTrainedModel:
    """The retrieval tier's own model, or a second copy of the target, quantised if set; a rank's share with a group."""
    own = settings.retrieval.model
    name, role = (own, "self-drafter") if own else (settings.target.model, "target")
    model = load_model(name, role, settings.dtype, settings.device, group, settings.target.context_length)
    if settings.retrieval.quantization:
        quantize_weights(model)
    return model


def load_local_engine(
    settings: Settings, *, drafting: bool | None = None, ranks: Leader | None = None, share: Share = WHOLE
) -> Engine:
    """The engine of the models that the settings name, which are checked before weights are loaded. `drafting`: whether
    to load the drafter; by default, if the lookaheads use it. `ranks`: the leader of as many ranks as the settings ask
    for. `share`: the part of the device that may be taken.
    """
    settings = resolved(settings)
    here = ranks.world if ranks else 1
    for tier in ("target", "retrieval"):
        wanted = settings.ranks((tier,))
        require(wanted == here, f"{tier}.tensor_parallel", wanted, f"needs {wanted} ranks: this command has {here}")
    if drafting is None:
        drafting = settings.speculation.effective[1] > 0
    drafter = drafter_weights(settings) if drafting and not settings.target.lossy else None
    check_pair(settings.target.model, drafter)
    if settings.retrieval.model:
        check_self_drafter(settings.target.model, settings.retrieval.model)

    def load(name: str, role: str, group: Leader | None = None) -> PreTrainedModel:
        check_kernel(settings, head_dim=kv_shape(load_config(name, role))[2])
        return load_model(name, role, settings.dtype, settings.device, group, settings.target.context_length)

    target, self_drafter = load(settings.target.model, "target", ranks), None
    small = load(drafter, "drafter") if drafter else None
    if settings.retrieval.own_weights and not settings.target.lossy:
        self_drafter = load_retrieval_model(settings, ranks) if settings.retrieval.model else quantized_copy(target)
    return local_engine(target, small, settings, self_drafter, ranks=ranks, share=share)
