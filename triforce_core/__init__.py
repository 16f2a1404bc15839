"""TriForce Serve's engine: hierarchical speculative decoding for long contexts (arXiv 2404.11912)."""

import logging

# Where torchao is installed, importing transformers makes it warn that some GPU kernels do not load, and torch about an
# Enum class. Without these filters that would precede the one line that a failing command prints.
logging.getLogger("torchao").addFilter(lambda record: "Failed to load" not in record.getMessage())
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())

__version__ = "0.1.0"
