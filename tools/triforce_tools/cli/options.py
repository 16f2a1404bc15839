"""The options that several of these commands share, beside those of `deploy.cli.options`."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options import DECODING_OPTIONS, DEVICE_OPTIONS, KV_OPTIONS, SAMPLING_HELP, settings_of

ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads")]
TemperatureOption = Annotated[float, typer.Option(help=SAMPLING_HELP["temperature"])]

# Settings of the benchmarks that decode in tier actors.
pipeline_settings = settings_of(*DECODING_OPTIONS, "cpu_latency_us", max_sequences=1)
# Settings of `triforce bench device`, whose models have a given shape and random weights.
geometry_settings = settings_of(
    *(*DEVICE_OPTIONS, "dtype", "lookaheads", "budget", "chunk", "self_drafter_quantization", *KV_OPTIONS, "threads")
)
