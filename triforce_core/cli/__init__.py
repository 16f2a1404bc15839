"""The `triforce` command: one module per group of commands, put together in `app`."""

from triforce_core.cli.app import main

__all__ = ["main"]
