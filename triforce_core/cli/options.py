"""The options that commands share, each stated once, and the settings that come of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from triforce_core.config import Settings, load_settings
from triforce_core.errors import require

Made = TypeVar("Made")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; see `triforce config`")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
TensorParallelOption = Annotated[
    int | None, typer.Option(help="processes that share target and retrieval tier, each with a GPU of its own")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu | cuda | cuda:N")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy")]
DrafterOption = Annotated[str | None, typer.Option(help="model directory or hub id; ngram: prompt lookup in its place")]
QuantizationOption = Annotated[
    str | None, typer.Option(help="int8 | int4 | fp8: of the retrieval tier's own copy of the target's weights")
]
KVDtypeOption = Annotated[
    str | None, typer.Option(help="the target's KV: auto | float8_e4m3fn: half the memory, but another target's tokens")
]
OffloadOption = Annotated[str | None, typer.Option(help="the target's KV: none | host | disk (--offload-path)")]
ResidentOption = Annotated[int | None, typer.Option(help="layers whose KV stays on the device under offload")]
OffloadPathOption = Annotated[str | None, typer.Option(help="directory for the KV where --offload is disk")]
SeedOption = Annotated[int, typer.Option(help="the same seed gives the same tokens")]


def with_options_of(
    make: Callable[..., Made],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The parameters of `make` become options of the command, whose first argument is what `make` makes of them.

    Typer reads the signature of a command: the decorated one has the command's own options, then those of `make`.
    """
    shared = inspect.signature(make, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*own, *shared.values()]

        @wraps(command)
        def run(**values: Any) -> None:
            made = make(**{name: values.pop(name) for name in shared})
            command(made, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def decoding_settings(
    tiers: Annotated[str | None, typer.Option(help="target | retrieval,target | draft,retrieval,target")] = None,
    lookaheads: Annotated[str | None, typer.Option(help="tokens drafted by retrieval and by draft, e.g. 8,3")] = None,
    budget: Annotated[int | None, typer.Option(help="tokens of KV in the retrieval tier")] = None,
    chunk: Annotated[int | None, typer.Option(help="tokens selected together")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16")] = None,
    target: Annotated[str | None, typer.Option(help="model directory or hub id")] = None,
    drafter: DrafterOption = None,
    self_drafter_quantization: QuantizationOption = None,
    kv_dtype: KVDtypeOption = None,
    offload: OffloadOption = None,
    resident_layers: ResidentOption = None,
    offload_path: OffloadPathOption = None,
    tensor_parallel: TensorParallelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    config: ConfigOption = None,
) -> Settings:
    """Of commands that decode one text in this process."""
    return settings_from(
        config,
        {
            "speculation.tiers": tiers,
            "speculation.lookaheads": None if lookaheads is None else parse_lookaheads(lookaheads),
            "retrieval.budget": budget,
            "retrieval.chunk": chunk,
            "retrieval.quantization": self_drafter_quantization,
            "dtype": dtype,
            "target.model": target,
            "draft.model": drafter,
            "target.kv_dtype": kv_dtype,
            "target.offload": offload,
            "target.resident_layers": resident_layers,
            "target.offload_path": offload_path,
            "target.tensor_parallel": tensor_parallel,
            "device": device,
            "threads.decode": threads,
            "threads.prefill": threads,
            "max_sequences": 1,
        },
    )


def geometry_settings(
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16")] = None,
    lookaheads: Annotated[str | None, typer.Option(help="tokens drafted by retrieval and by draft, e.g. 8,3")] = None,
    budget: Annotated[int | None, typer.Option(help="tokens of KV in the retrieval tier")] = None,
    chunk: Annotated[int | None, typer.Option(help="tokens selected together")] = None,
    self_drafter_quantization: QuantizationOption = None,
    kv_dtype: KVDtypeOption = None,
    offload: OffloadOption = None,
    resident_layers: ResidentOption = None,
    offload_path: OffloadPathOption = None,
    threads: ThreadsOption = None,
    config: ConfigOption = None,
) -> Settings:
    """Of commands that run models of a given shape, whatever their weights."""
    return settings_from(
        config,
        {
            "device": device,
            "dtype": dtype,
            "speculation.lookaheads": None if lookaheads is None else parse_lookaheads(lookaheads),
            "retrieval.budget": budget,
            "retrieval.chunk": chunk,
            "retrieval.quantization": self_drafter_quantization,
            "target.kv_dtype": kv_dtype,
            "target.offload": offload,
            "target.resident_layers": resident_layers,
            "target.offload_path": offload_path,
            "threads.decode": threads,
            "threads.prefill": threads,
        },
    )


def serving_settings(
    port: Annotated[int | None, typer.Option(help="HTTP port")] = None,
    drafter: DrafterOption = None,
    self_drafter_quantization: QuantizationOption = None,
    kv_dtype: KVDtypeOption = None,
    offload: OffloadOption = None,
    resident_layers: ResidentOption = None,
    offload_path: OffloadPathOption = None,
    tensor_parallel: TensorParallelOption = None,
    device: DeviceOption = None,
    config: ConfigOption = None,
) -> Settings:
    """Of commands that serve."""
    return settings_from(
        config,
        {
            "server.port": port,
            "draft.model": drafter,
            "retrieval.quantization": self_drafter_quantization,
            "target.kv_dtype": kv_dtype,
            "target.offload": offload,
            "target.resident_layers": resident_layers,
            "target.offload_path": offload_path,
            "target.tensor_parallel": tensor_parallel,
            "device": device,
        },
    )


def settings_from(config: Path | None, given: dict[str, Any]) -> Settings:
    """Settings of the file with those on top that the command line gives (the others are None), by their full names."""
    overrides: dict[str, Any] = {}
    for name, value in given.items():
        section, _, field = name.rpartition(".")
        if value is not None:
            (overrides.setdefault(section, {}) if section else overrides)[field] = value
    return load_settings(config, **overrides)


def parse_lookaheads(text: str) -> list[int]:
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    require(len(numbers) == 2, "lookaheads", text, "must be two whole numbers: retrieval,draft")
    return numbers
