"""The devices and dtypes that settings may name, and checks that this machine has them."""

import torch

from triforce_core.errors import InvalidValueError, require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BFLOAT16_CAPABILITY = (8, 0)  # NVIDIA Ampere and later


def torch_device(name: str) -> torch.device:
    """The device of this name. Raises `InvalidValueError` if this machine does not have it. Starts no CUDA context."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidValueError("device", name, "must be cpu, cuda or cuda:N") from None
    require(device.type in ("cpu", "cuda"), "device", name, "must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require(count > 0, "device", name, f"needs a GPU: PyTorch {torch.__version__} {built} and sees none here")
        rule = f"must be below cuda:{count}: GPUs here are numbered from 0, and PyTorch sees {count}"
        require((device.index or 0) < count, "device", name, rule)
    return device


def check_dtype(dtype: str, device: torch.device) -> None:
    """Raise `InvalidValueError` for bfloat16 on a GPU that does not compute with it."""
    if device.type != "cuda" or dtype != "bfloat16":
        return
    has = torch.cuda.get_device_capability(device)
    rule = (
        f"needs a GPU of compute capability 8.0 or more, and {device} ({torch.cuda.get_device_name(device)}) has"
        f" {has[0]}.{has[1]}: set dtype: float16"
    )
    require(has >= BFLOAT16_CAPABILITY, "dtype", dtype, rule)
