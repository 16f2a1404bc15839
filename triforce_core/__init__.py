"""TriForce Serve's engine: hierarchical speculative decoding for long contexts (arXiv 2404.11912)."""

import logging

# What torchao says when transformers imports it: that some kernels for GPUs, which we do not use, do not load here, and
# that torch has news for it. Both harmless, and commands print one line where they refuse.
logging.getLogger("torchao").addFilter(lambda record: "Failed to load" not in record.getMessage())
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())

__version__ = "0.1.0"
