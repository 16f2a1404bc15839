"""TriForce Serve's engine: hierarchical speculative decoding for long contexts (arXiv 2404.11912)."""

import logging

# Importing transformers makes torchao warn that some GPU kernels do not load, and makes torch warn about an Enum class.
# Both warnings are harmless; without these filters they would precede the one line that a failing command prints.
logging.getLogger("torchao").addFilter(lambda record: "Failed to load" not in record.getMessage())
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())

__version__ = "0.1.0"
