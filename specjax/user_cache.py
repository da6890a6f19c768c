"""Where downloaded models, measurements and compiled programs are kept."""

import hashlib
import os
import platform
from pathlib import Path

import platformdirs

MOST_BYTES = 2_000_000_000
"""Compiled programs that are kept; those that were not used for longest go."""


def user_cache_folder() -> Path:
    """The user's cache folder for specjax: ``$XDG_CACHE_HOME/specjax`` or ``~/.cache/specjax`` on Linux; it may not exist yet.

    Example:
      >>> user_cache_folder().name
      'specjax'
    """
    return platformdirs.user_cache_path("specjax", appauthor=False)


def keep_programs() -> None:
    """Has the programs that this process compiles kept in the user's cache folder, for the next process that needs them.

    For programs of one's own alone, before JAX is imported: it goes through the variables that JAX reads then, and what the user
    has set there stays.
    """
    # The folder may be on a disk that several machines share, and a program is made for one processor's instructions.
    here = hashlib.sha256(processor().encode()).hexdigest()[:8]
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(user_cache_folder() / "programs" / here))
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MOST_BYTES))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def processor() -> str:
    """The processor's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
