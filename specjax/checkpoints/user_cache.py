"""Where downloaded models and measurements are kept."""

from pathlib import Path

import platformdirs


def user_cache_folder() -> Path:
    """The user's cache folder for specjax: ``$XDG_CACHE_HOME/specjax`` or ``~/.cache/specjax`` on Linux; it may not exist yet.

    Example:
      >>> user_cache_folder().name
      'specjax'
    """
    return platformdirs.user_cache_path("specjax", appauthor=False)
