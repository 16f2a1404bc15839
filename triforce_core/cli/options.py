"""The options that commands share, each stated once, and the settings that come of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from triforce_core.config import Settings, load_settings
from triforce_core.errors import require
from triforce_core.messages import SamplingParams
from triforce_core.models.precision import resolved

SAMPLING_HELP = {
    "temperature": "0 is greedy",
    "top_k": "keep the k most probable tokens; 0 keeps all",
    "top_p": "keep the most probable tokens up to this probability",
    "min_p": "keep tokens this probable relative to the best",
}

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; see `triforce config`")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads")]
TemperatureOption = Annotated[float, typer.Option(help=SAMPLING_HELP["temperature"])]
SeedOption = Annotated[int, typer.Option(help="the same seed gives the same tokens")]


def with_options_of(*makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The parameters of each maker become options of the command, whose first arguments are what the makers make of
    them.

    Typer reads the signature of a command: the decorated one has the command's own options, then those of the makers.
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


def sampling_params(**given: Any) -> SamplingParams:
    """Of an option for each of its fields."""
    return SamplingParams(**given)


sampling_params.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[parameter.annotation, typer.Option(help=SAMPLING_HELP.get(name))],
        )
        for name, parameter in inspect.signature(SamplingParams, eval_str=True).parameters.items()
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
    """An option that stands for settings: where it is not given, they are those of the file."""

    kind: type
    help: str
    fields: tuple[str, ...]  # by their full names
    parse: Callable[[Any], Any] = lambda given: given

    def parameter(self, name: str) -> inspect.Parameter:
        annotation = Annotated[self.kind | None, typer.Option(help=self.help)]  # type: ignore[name-defined]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


SETTING_OPTIONS = {
    "port": SettingOption(int, "HTTP port", ("server.port",)),
    "tiers": SettingOption(str, "target | retrieval,target | draft,retrieval,target", ("speculation.tiers",)),
    "lookaheads": SettingOption(
        str, "tokens drafted by retrieval and by draft, e.g. 8,3", ("speculation.lookaheads",), parse_lookaheads
    ),
    "budget": SettingOption(int, "tokens of KV in the retrieval tier", ("retrieval.budget",)),
    "chunk": SettingOption(int, "tokens selected together", ("retrieval.chunk",)),
    "dtype": SettingOption(str, "auto | float32 | bfloat16 | float16", ("dtype",)),
    "target": SettingOption(str, "model directory or hub id", ("target.model",)),
    "drafter": SettingOption(str, "model directory or hub id; ngram: prompt lookup in its place", ("draft.model",)),
    "self_drafter_quantization": SettingOption(
        str, "int8 | int4 | fp8: of the retrieval tier's own copy of the target's weights", ("retrieval.quantization",)
    ),
    "offload": SettingOption(str, "the target's KV: none | host | disk (--offload-path)", ("target.offload",)),
    "resident_layers": SettingOption(
        int, "layers whose KV stays on the device under offload", ("target.resident_layers",)
    ),
    "offload_path": SettingOption(str, "directory for the KV where --offload is disk", ("target.offload_path",)),
    "tensor_parallel": SettingOption(
        int, "processes that share target and retrieval tier, each with a GPU of its own", ("target.tensor_parallel",)
    ),
    "device": SettingOption(str, "cpu | cuda | cuda:N", ("device",)),
    "graphs": SettingOption(str, "passes over few tokens as CUDA graphs: auto | on | eager | off", ("graphs",)),
    "compile": SettingOption(str, "norms and the like as fused kernels: auto | on | off", ("compile",)),
    "cpu_latency_us": SettingOption(
        int, "microseconds that the nodes' cores may take to wake; 0: they never sleep", ("placement.cpu_latency_us",)
    ),
    "threads": SettingOption(int, "CPU threads", ("threads",)),
}
KV_OPTIONS = ("offload", "resident_layers", "offload_path")
DEVICE_OPTIONS = ("device", "graphs", "compile")


def settings_of(*names: str, **fixed: Any) -> Callable[..., Settings]:
    """What makes settings of these options and `--config`; those in `fixed` are the command's own choice.

    The commands run on this machine, so `dtype: auto` becomes its precision here.
    """

    def make(config: Path | None, **given: Any) -> Settings:
        values = {
            field: None if value is None else SETTING_OPTIONS[name].parse(value)
            for name, value in given.items()
            for field in SETTING_OPTIONS[name].fields
        }
        return resolved(settings_from(config, values | fixed))

    parameters = [SETTING_OPTIONS[name].parameter(name) for name in names]
    of_file = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption)
    make.__signature__ = inspect.Signature([*parameters, of_file])  # type: ignore[attr-defined]
    return make


def settings_from(config: Path | None, given: dict[str, Any]) -> Settings:
    """Settings of the file with those on top that the command line gives (the others are None), by their full names."""
    overrides: dict[str, Any] = {}
    for name, value in given.items():
        section, _, field = name.rpartition(".")
        if value is not None:
            (overrides.setdefault(section, {}) if section else overrides)[field] = value
    return load_settings(config, **overrides)


DECODING_OPTIONS = (
    *("tiers", "lookaheads", "budget", "chunk", "dtype", "target", "drafter", "self_drafter_quantization"),
    *(*KV_OPTIONS, "tensor_parallel", *DEVICE_OPTIONS, "threads"),
)

# Of commands that decode one text in this process.
decoding_settings = settings_of(*DECODING_OPTIONS, max_sequences=1)
# Of commands that decode in tier actors.
pipeline_settings = settings_of(*DECODING_OPTIONS, "cpu_latency_us", max_sequences=1)
# Of commands that run models of a given shape, whatever their weights.
geometry_settings = settings_of(
    *(*DEVICE_OPTIONS, "dtype", "lookaheads", "budget", "chunk", "self_drafter_quantization", *KV_OPTIONS, "threads")
)
# Of commands that serve.
serving_settings = settings_of(
    *("port", "dtype", "drafter", "self_drafter_quantization", *KV_OPTIONS, "tensor_parallel", *DEVICE_OPTIONS),
    "cpu_latency_us",
)
