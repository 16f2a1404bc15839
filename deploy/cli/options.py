"""The options that commands share, each defined once, and the settings made from them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from triforce_core.config import SELECTOR_NAMES, Settings, load_settings
from triforce_core.errors import InvalidValueError, require
from triforce_core.messages import SamplingParams
from triforce_core.models.precision import resolved

SAMPLING_HELP = {
    "temperature": "0 is greedy",
    "top_k": "keep the k most probable tokens; 0 keeps all",
    "top_p": "keep the most probable tokens up to this probability",
    "min_p": "keep tokens this probable relative to the best",
    "repetition_penalty": "for tokens in prompt or output: divides positive logits; 1 is off",
    "presence_penalty": "subtracted from the logits of tokens in the output",
    "frequency_penalty": "the same, times the number of occurrences",
    "min_tokens": "nothing ends the output before it has this many tokens",
}

ConfigOption = Annotated[
    Path | None,
    # Reading it says more than Typer would.
    typer.Option("--config", readable=False, help="YAML file of settings; see `triforce config`"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
# The bounds are those of requests (`Limits.check`): what lies beyond is refused before models are loaded.
SeedOption = Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="the same seed gives the same tokens")]


def with_options_of(*makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that turns the parameters of each maker into options of the command, and passes the makers' results
    as the command's first arguments.

    The decorated command's signature, which typer reads, has the command's own options and then those of the makers.
    """
    shared = [inspect.signature(make, eval_str=True).parameters for make in makers]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [*inspect.signature(command, eval_str=True).parameters.values()][len(makers) :]
        parameters = [*own, *(parameter for of_one in shared for parameter in of_one.values())]

        @wraps(command)
        def run(**values: Any) -> None:
            given = [{name: values.pop(name) for name in of_one} for of_one in shared]
            made = [make(**options) for make, options in zip(makers, given, strict=True)]
            command(*made, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def sampling_params(logit_bias: list[str], **given: Any) -> dict[str, Any]:
    """The sampling parameters that are given, from one option per number, and `--logit-bias`."""
    stated = {name: value for name, value in given.items() if value is not None}
    stated["logit_bias"] = tuple(parse_bias(text) for text in logit_bias)
    SamplingParams(**stated)  # refuses what is out of range
    return stated


def parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidValueError("logit-bias", text, "must be a token id and a number: ID=NUMBER") from None


sampling_params.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(
            parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[parameter.annotation | None, typer.Option(help=SAMPLING_HELP.get(name))],
            )
            for name, parameter in inspect.signature(SamplingParams, eval_str=True).parameters.items()
            if parameter.annotation in (int, float)
        ),
        inspect.Parameter(
            "logit_bias",
            inspect.Parameter.KEYWORD_ONLY,
            default=[],
            annotation=Annotated[list[str], typer.Option(help="ID=NUMBER: add NUMBER to the logit of a token id")],
        ),
    ]
)


def parse_lookaheads(text: str) -> list[int]:
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    require(len(numbers) == 2, "lookaheads", text, "must be two whole numbers: retrieval,draft")
    return numbers


@dataclass(frozen=True, slots=True)
class SettingOption:
    """A command-line option that overrides a setting of the file; if it is not given, the file's value stays."""

    kind: type
    help: str
    field: str  # full name of the setting, such as "retrieval.budget"
    parse: Callable[[Any], Any] = lambda given: given
    flags: tuple[str, ...] = ()  # by default the one of its name

    def parameter(self, name: str) -> inspect.Parameter:
        annotation = Annotated[self.kind | None, typer.Option(*self.flags, help=self.help)]  # type: ignore[name-defined]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


SETTING_OPTIONS = {
    "host": SettingOption(str, "address to listen on; 0.0.0.0 accepts other machines", "server.host"),
    "port": SettingOption(int, "HTTP port", "server.port"),
    "tiers": SettingOption(str, "target | retrieval,target | draft,retrieval,target", "speculation.tiers"),
    "lookaheads": SettingOption(
        str, "tokens drafted by retrieval and by draft, e.g. 8,3", "speculation.lookaheads", parse_lookaheads
    ),
    "budget": SettingOption(int, "tokens of KV in the retrieval tier", "retrieval.budget"),
    "chunk": SettingOption(int, "tokens selected together", "retrieval.chunk"),
    "selector": SettingOption(str, f"how chunks are selected: {' | '.join(SELECTOR_NAMES)}", "retrieval.selector"),
    "dtype": SettingOption(str, "auto | float32 | bfloat16 | float16", "dtype"),
    "target": SettingOption(
        str, "the model: its directory, hub id or .gguf file", "target.model", flags=("--model", "--target")
    ),
    "drafter": SettingOption(str, "model directory or hub id, or ngram for prompt lookup", "draft.model"),
    "self_drafter_quantization": SettingOption(
        str, "8-bit weights for the retrieval tier: int8", "retrieval.quantization"
    ),
    "offload": SettingOption(str, "the target's KV: none | host | disk (--offload-path)", "target.offload"),
    "resident_layers": SettingOption(
        int, "layers whose KV stays on the device under offload", "target.resident_layers"
    ),
    "offload_path": SettingOption(str, "directory for the KV under --offload disk", "target.offload_path"),
    "tensor_parallel": SettingOption(
        int, "processes that share target and retrieval tier, one GPU each", "target.tensor_parallel"
    ),
    "device": SettingOption(str, "cpu | cuda | cuda:N", "device"),
    "graphs": SettingOption(str, "passes over few tokens as CUDA graphs: auto | on | eager | off", "graphs"),
    "compile": SettingOption(str, "fused kernels for norms, activations etc.: auto | on | off", "compile"),
    "cpu_latency_us": SettingOption(
        int, "most microseconds that CPU cores may take to wake; 0: cores never sleep", "placement.cpu_latency_us"
    ),
    "threads": SettingOption(int, "CPU threads", "threads"),
}
KV_OPTIONS = ("offload", "resident_layers", "offload_path")
DEVICE_OPTIONS = ("device", "graphs", "compile")


def settings_of(*names: str, **fixed: Any) -> Callable[..., Settings]:
    """A maker (see `with_options_of`) of settings from the options `names` and `--config`; the command fixes the
    settings in `fixed`.

    The commands run on this machine, so `dtype: auto` becomes this machine's precision.
    """

    def make(config: Path | None, **given: Any) -> Settings:
        values = {
            SETTING_OPTIONS[name].field: None if value is None else SETTING_OPTIONS[name].parse(value)
            for name, value in given.items()
        }
        return resolved(settings_from(config, values | fixed))

    parameters = [SETTING_OPTIONS[name].parameter(name) for name in names]
    of_file = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption)
    make.__signature__ = inspect.Signature([*parameters, of_file])  # type: ignore[attr-defined]
    return make


def settings_from(config: Path | None, given: dict[str, Any]) -> Settings:
    """The settings of the file, overridden by the values in `given`, by full name; None overrides nothing."""
    overrides: dict[str, Any] = {}
    for name, value in given.items():
        section, _, field = name.rpartition(".")
        if value is not None:
            (overrides.setdefault(section, {}) if section else overrides)[field] = value
    return load_settings(config, **overrides)


DECODING_OPTIONS = (
    *("tiers", "lookaheads", "budget", "chunk", "selector", "dtype", "target", "drafter", "self_drafter_quantization"),
    *(*KV_OPTIONS, "tensor_parallel", *DEVICE_OPTIONS, "threads"),
)

# Settings of commands that decode one text in this process.
decoding_settings = settings_of(*DECODING_OPTIONS, max_sequences=1)
# Settings of `triforce serve`.
serving_settings = settings_of(
    *("target", "drafter", "host", "port", "dtype", "self_drafter_quantization", *KV_OPTIONS, "tensor_parallel"),
    *(*DEVICE_OPTIONS, "cpu_latency_us"),
)
