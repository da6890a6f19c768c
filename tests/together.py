"""Runs Python in several processes that JAX joins over loopback, each with one CPU device."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_address() -> str:
    """HOST:PORT of a port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"


def run_together(calls: Sequence[Sequence[str]], folders: Sequence[Path], seconds: float = 500) -> list[tuple[int, str, str]]:
    """Runs ``python ARGUMENTS`` for each of ``calls`` at once, each in its folder; (status, output, standard error) of each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    running = [
        subprocess.Popen(
            [sys.executable, *call], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for call, folder in zip(calls, folders, strict=True)
    ]
    try:
        said = [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *streams) for process, streams in zip(running, said, strict=True)]
