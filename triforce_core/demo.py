"""Where the demo pair lies: the weights of a small target and its drafter, made by `triforce demo train`.

They are a distribution of their own (folder demo_weights/), so that whoever installs only the client does not download
them.
"""

from importlib.resources import files
from pathlib import Path

from triforce_core import __version__
from triforce_core.errors import UnknownModelError

PACKAGE = "triforce_serve_demo"


def weights_dir(role: str) -> Path:
    """The folder of the pair's `target` or `drafter`. Raises `UnknownModelError`, naming `role`, if not installed."""
    try:
        return Path(str(files(PACKAGE) / role))
    except ModuleNotFoundError:
        needed = f"triforce-serve-demo=={__version__}"
        raise UnknownModelError(
            role, "demo", f"needs the weights of the demo pair, which are not installed: pip install {needed}"
        ) from None
