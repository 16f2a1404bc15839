"""TriForce Serve's engine: hierarchical speculative decoding for long contexts (arXiv 2404.11912)."""

__version__ = "0.1.0"
