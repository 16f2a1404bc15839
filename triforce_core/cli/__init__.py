"""The `triforce` command: one module a group of commands, wired together in `app`."""

from triforce_core.cli.app import main

__all__ = ["main"]
