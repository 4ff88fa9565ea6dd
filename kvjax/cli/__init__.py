"""The `kvjax` command: one file a subcommand, options that several share in `options`."""

from kvjax.cli.app import app, main

__all__ = ["app", "main"]
