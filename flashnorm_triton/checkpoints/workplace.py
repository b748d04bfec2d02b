"""The temporary folder beside DST: written in, renamed at the end, never left but by a kill.

It holds a marker that is locked as long as its fold runs. What a killed fold has left is known by
its marker and by the lock that is free, and the next fold to the same place clears it away.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

MARKER = ".flashnorm-unfinished"
_SUFFIX = ".tmp"


def clear_leftovers(destination: Path) -> tuple[Path, ...]:
    """Remove the temporary folders that killed folds to ``destination`` have left; their paths.

    Raises FileExistsError when another fold is writing to the same place now.
    """
    cleared = []
    target = destination.resolve()
    pattern = glob.escape(f".{target.name}.") + "*" + glob.escape(_SUFFIX)
    for folder in sorted(target.parent.glob(pattern)):
        marker = folder / MARKER
        if fcntl is None or folder.is_symlink() or not marker.is_file():
            continue  # not known to be one, or not known to be over
        with marker.open("rb") as held:
            if not _lock(held):
                raise FileExistsError(f"another fold is writing {destination} now (in {folder})")
            shutil.rmtree(folder)
        cleared.append(folder)
    return tuple(cleared)


@contextmanager
def workplace(destination: Path) -> Iterator[Path]:
    """A new folder beside ``destination``, which it becomes when the block ends without an error.

    Otherwise it is removed. SIGTERM and SIGHUP (a closed terminal) end the block like an exception,
    unless they are ignored.
    """
    target = destination.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _stoppable():
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent))
        try:
            os.chmod(work, 0o777 & ~_umask())
            with (work / MARKER).open("wb") as held:
                _lock(held)
                yield work
                (work / MARKER).unlink()
                os.replace(work, target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _lock(file: IO[bytes]) -> bool:
    """Whether the file could be locked: nobody else holds it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can tell
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _stoppable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
