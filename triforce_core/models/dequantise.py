"""Checkpoints that are stored quantised and served dequantised: transformers reads them so if their configuration asks.

The memory of the weights is that of the precision that is served; their values are those that were stored.
"""

from importlib.util import find_spec
from typing import Any

from transformers.configuration_utils import PretrainedConfig

# The forms in which a method may store weights, as the field `format` names them; empty: a method has one form.
METHODS: dict[str, tuple[str, ...]] = {
    "fp8": (),
    "mxfp4": (),
    "compressed-tensors": ("float-quantized", "int-quantized", "pack-quantized"),
}
PACKAGES = {"compressed-tensors": "compressed_tensors"}  # that a method needs
# Scales of activations, which are not quantised here.
PASSED_OVER = ("activation_scale", "input_scale", "qscale_act")


def method_of(config: PretrainedConfig) -> str | None:
    """The method by which a checkpoint is quantised that can be dequantised; None for any other, and for none."""
    found: Any = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method not in METHODS:
        return None
    forms = {found.get("format"), *(each.get("format") for each in found.get("config_groups", {}).values())} - {None}
    return method if not METHODS[method] or (forms and forms <= {*METHODS[method]}) else None


def missing_package(config: PretrainedConfig) -> str:
    """The package that must be installed to read this checkpoint; empty if none is missing."""
    package = PACKAGES.get(method_of(config) or "")
    return "" if package is None or find_spec(package) else package.replace("_", "-")


def weights_of(name: str, numbers: int, config: PretrainedConfig) -> int:
    """How many weights a stored tensor of this name and so many numbers becomes, if the checkpoint is quantised."""
    if (method := method_of(config)) is None:
        return numbers
    if name.endswith("_blocks"):  # of MXFP4: two in a byte
        return 2 * numbers
    if name.endswith("_packed"):
        (group, *_) = config.quantization_config["config_groups"].values()
        return numbers * 32 // int(group["weights"]["num_bits"])
    return numbers if method == "fp8" or name.endswith((".weight", ".bias")) else 0
