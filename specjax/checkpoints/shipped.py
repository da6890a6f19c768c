"""Files that come with the library: model cards and trained drafts."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder(name: str) -> Path:
    """The folder ``name`` ("models" or "checkpoints") that came with the library.

    An installed wheel carries it inside the package; in a checkout it lies beside the package.

    Raises:
      FileNotFoundError: neither is there.

    Example:
      >>> shipped_folder("models").name
      'models'
    """
    places = (PACKAGE / "_shipped" / name, PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"the folder {name!r} that comes with specjax is missing; looked at {' and '.join(map(str, places))}")
