"""The command line: parse, call, print.

Importing this imports no JAX: ``specjax --help`` answers at once, and each command imports what it needs.
"""

from specjax.cli.app import main

__all__ = ["main"]
