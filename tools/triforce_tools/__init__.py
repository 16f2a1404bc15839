"""Measures TriForce Serve, evaluates its caches, and trains its demo pair. Nothing that serves imports it."""
