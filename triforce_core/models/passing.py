"""One pass of a model over a batch. Its attention finds the batch here, because some models hand no arguments of ours
down to it.
"""

from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

BATCH: ContextVar[Any] = ContextVar("BATCH")  # of the pass that this thread runs: a `Batch`, or what stands for one


def run_pass(model: PreTrainedModel, batch: Any, **inputs: Any) -> Any:
    """What the model gives for these inputs, attending through the batch's cache."""
    before = BATCH.set(batch)
    try:
        return model(**inputs, use_cache=False)
    finally:
        BATCH.reset(before)
