"""KV caches, one policy per file. A policy decides which positions are held and where; the base class does the rest."""
