"""Brings models from a model hub into huggingface-hub's own cache: only the files that are read here, and never a pickle.

That library finds the hub, keeps the cache and knows the user's token and whether it may use the network (its HF_HUB_OFFLINE).
"""

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.checkpoints.download import DownloadError
from specjax.checkpoints.folder_config import FAMILIES, read_config
from specjax.checkpoints.safetensors import INDEX, WEIGHTS, indexed_files
from specjax.checkpoints.tokenizer_files import OTHER_FORMS

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_hub_id(source: object) -> bool:
    """Whether a source looks like the id of a repository on a hub.

    Example:
      >>> [is_hub_id(source) for source in ("org/name", "name", "./org/name", "org/name.gguf", "a/b/c")]
      [True, False, False, False, False]
    """
    if not isinstance(source, str) or source.startswith(".") or source.endswith(".gguf"):
        return False
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None


def fetch(repository: str, revision: str | None = None, subfolder: str = "") -> Path:
    """The folder of a model from the hub, or from the cache where the network is away or not wanted.

    Configuration and tokenizer come first, and what is wrong with them is said before the weights are downloaded.

    Args:
      repository: such as "org/name".
      revision: a branch, a tag or a commit; None: the main branch.
      subfolder: where in the repository the model is; "" for its top.

    Raises:
      DownloadError: there is no such repository, revision or model in it, it is gated, or the hub cannot be reached and the
        model is not in the cache.
      ValueError: the model is not supported.
    """
    # Not before it is needed: importing it takes longer than much of what the command line does.
    from huggingface_hub import snapshot_download

    def download(names: Sequence[str], revision: str | None) -> Path:
        patterns = [glob.escape(f"{subfolder}/{name}" if subfolder else name) for name in names]
        with _one_line(repository, revision):
            return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, library_name="specjax"))

    snapshot = download(SMALL_FILES, revision)
    # All of it from one commit, whatever happens to the branch meanwhile.
    commit = snapshot.name
    folder = snapshot / subfolder
    where = f"{repository!r}{f', folder {subfolder!r}' if subfolder else ''} on the hub"
    if not (folder / CONFIG).exists():
        raise _lacking(repository, commit, subfolder, where, CONFIG)
    # As if every model had an output matrix: its tensors are not known yet.
    read_config(folder, {family.names.unembedding: () for family in FAMILIES.values()})
    if not (folder / TOKENIZER).exists():
        # Without the network nothing is known of other forms.
        other = next((name for name in OTHER_FORMS if name in (_names(repository, commit, subfolder) or ())), None)
        if other is not None:
            raise DownloadError(f"{where}: has {other} but no {TOKENIZER}, the only form that can be read")
    weights = indexed_files(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
    if not all((folder / name).exists() for name in weights):
        download(weights, commit)
    for name in weights:
        if not (folder / name).exists():
            raise _lacking(repository, commit, subfolder, where, name)
    return folder


def _names(repository: str, commit: str, subfolder: str) -> list[str] | None:
    """The files that a folder of the repository has; None where the hub does not answer."""
    from huggingface_hub import HfApi, errors

    try:
        names = HfApi(library_name="specjax").list_repo_files(repository, revision=commit)
    except (errors.HTTPError, OSError):
        return None
    prefix = f"{subfolder}/" if subfolder else ""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _lacking(repository: str, commit: str, subfolder: str, where: str, name: str) -> DownloadError:
    names = _names(repository, commit, subfolder)
    if names is None:
        return DownloadError(f"{where}: {name} is not in the cache, and the hub cannot be asked for it")
    # At the top of that folder: what lies deeper belongs to something else.
    names = [name for name in names if "/" not in name]
    if name == WEIGHTS and (pickles := [name for name in names if name.endswith(PICKLES)]):
        return DownloadError(
            f"{where}: has its weights in {pickles[0]} and no safetensors; that is a pickle, and nothing is ever unpickled here, "
            "for it could run any code"
        )
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        return DownloadError(f"{where}: has no {name}, but {files[0]}; download that file and give its path")
    return DownloadError(f"{where}: has no {name}")


@contextlib.contextmanager
def _one_line(repository: str, revision: str | None) -> Iterator[None]:
    """Turns what can go wrong on the way to a hub into one clear line."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        raise DownloadError(
            f"{repository!r} is gated: ask for access at {constants.ENDPOINT}/{repository}, log in with `hf auth login`, and try "
            "again"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"{repository!r} is no file or folder here, and {constants.ENDPOINT} has no such repository, or a private one; for "
            "that, log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadError(f"{repository!r} has no revision {revision!r}") from None
    except errors.LocalEntryNotFoundError:
        at = "" if revision is None else f" at revision {revision!r}"
        if constants.HF_HUB_OFFLINE:
            raise DownloadError(
                f"{repository!r}{at} is no file or folder here and not, or not all of it, in the cache {constants.HF_HUB_CACHE}; "
                "HF_HUB_OFFLINE forbids to download it"
            ) from None
        raise DownloadError(
            f"{repository!r}{at} is no file or folder here and not, or not all of it, in the cache {constants.HF_HUB_CACHE}, and "
            f"{constants.ENDPOINT} cannot be reached; check the network"
        ) from None
    except errors.HFValidationError as error:
        raise DownloadError(f"{repository!r} is no file or folder here, and no id of a repository: {error}") from None
    except (errors.HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadError(f"{repository!r} could not be downloaded from {constants.ENDPOINT}: {reason}") from None
