"""What a model's generation_config.json asks for where a request does not say. As vLLM has it, the file's numbers are
defaults of requests; tokens that it excludes are excluded from every output.
"""

from typing import Any

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, UnknownModelError
from triforce_core.messages import UNCHANGED, SamplingParams
from triforce_core.models.files import generation_config

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# What else in the file would change tokens, with the values that ask for nothing.
OTHERS: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": (None, []),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "max_new_tokens": (None,),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "sequence_bias": (None, {}),
    "stop_strings": (None, []),
    "top_h": (None, 1),
    "typical_p": (None, 1),
    "watermarking_config": (None,),
}


def stated(settings: Settings) -> dict[str, Any]:
    """What the target's file states; nothing where the settings say that it is not read."""
    return {} if settings.target.generation_config == "none" else generation_config(settings.target.model)


def default_sampling(settings: Settings) -> SamplingParams:
    """The sampling parameters of a request that states none. Raises `UnknownModelError` for values out of range."""
    found = stated(settings)
    given = {name: found[name] for name in NUMBERS if found.get(name) is not None}
    if found.get("do_sample") is False:
        given["temperature"] = 0.0
    alone = [[token] for token in found.get("suppress_tokens") or ()]
    try:
        words = tuple(tuple(word) for word in (*(found.get("bad_words_ids") or ()), *alone))
        return SamplingParams(**given, bad_word_ids=words)
    except (InvalidValueError, TypeError) as error:
        rule = (
            f"has a generation_config.json that is refused ({error}): correct it, or set target.generation_config: none"
        )
        raise UnknownModelError("target", settings.target.model, rule) from None


def line(settings: Settings) -> str:
    """The file's defaults and what of it is not applied, in words; empty if it asks for nothing."""
    found, defaults = stated(settings), default_sampling(settings)
    says = [f"{name} {value:g}" for name in NUMBERS if (value := getattr(defaults, name)) != getattr(UNCHANGED, name)]
    if defaults.bad_word_ids:
        says.append(f"words that never occur: {len(defaults.bad_word_ids)}")
    ignored = [name for name, neutral in OTHERS.items() if found.get(name) not in neutral]
    applied = f"requests by default: {', '.join(says)} (the model's generation_config.json)" if says else ""
    rest = f"NOT applied of generation_config.json: {', '.join(ignored)}" if ignored else ""
    return "; ".join(filter(None, (applied, rest)))
