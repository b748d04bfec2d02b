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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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

    Otherwise it is removed, with the folders above it that were made for it. Ctrl-C, SIGTERM and
    SIGHUP (a closed terminal) end the block like an exception, unless they are ignored; one that
    comes while the folder takes its place undoes that, and none disturbs the clearing away.
    """
    target = destination.resolve()
    made: list[Path] = []
    work = None
    with _Signals() as signals:
        try:
            _make(target.parent, made)
            prefix = f".{target.name}."
            work = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=target.parent))
            os.chmod(work, 0o777 & ~_umask())
            with (work / MARKER).open("wb") as held:
                _lock(held)
                with signals.heard():
                    yield work
                (work / MARKER).unlink()
                os.replace(work, target)
                if signals.came is not None:
                    os.replace(target, work)
                    signals.deliver()
        except BaseException:
            if work is not None:
                shutil.rmtree(work, ignore_errors=True)
            for folder in reversed(made):
                with suppress(OSError):  # somebody else's things are in it by now
                    folder.rmdir()
            raise


def _make(parent: Path, made: list[Path]) -> None:
    """Make a folder and all above it; those that were made are added to ``made``."""
    for folder in reversed([one for one in (parent, *parent.parents) if not one.exists()]):
        with suppress(FileExistsError):  # another program was faster: it is not ours
            folder.mkdir()
            made.append(folder)


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


class _Signals:
    """Holds back the signals that end the process, but inside :meth:`heard`, where they raise.

    ``came`` is the first one; a later one changes nothing.
    """

    def __init__(self) -> None:
        self.came: int | None = None
        self._before: dict[int, Any] = {}
        self._delivered = self._raises = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.came is not None and not self._delivered:
            self.deliver()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within, the first signal raises KeyboardInterrupt or SystemExit."""
        self._raises = True
        try:
            if self.came is not None:
                self.deliver()
            yield
        finally:
            self._raises = False

    def deliver(self) -> None:
        """Raise what the signal that came stands for."""
        self._delivered = True
        if self.came == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.came or 0))

    def _handle(self, number: int, frame: object) -> None:
        if self.came is None:
            self.came = number
            if self._raises:
                self.deliver()
