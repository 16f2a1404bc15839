"""The `triforce` command: one module per group of commands, put together in `app`."""

from deploy.cli.app import main

__all__ = ["main"]
