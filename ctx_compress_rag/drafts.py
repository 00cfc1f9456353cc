"""Files and folders that are written whole or not at all."""

import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_LOCK = ".ctx-compress-draft"


@contextmanager
def draft(target: Path) -> Iterator[Path]:
    """Give a path beside `target` to write a file or folder to, which then becomes `target`.

    What a killed process left there is removed. Raises OSError if nothing can be written, or a full folder is there.
    """
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    for lock in target.parent.glob(f".{glob.escape(target.name)}-*/{_LOCK}"):
        with suppress(OSError), FileLock(lock, timeout=0):  # who writes it holds its lock
            shutil.rmtree(lock.parent, ignore_errors=True)
    place = TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True)
    with place as folder, FileLock(Path(folder, _LOCK), timeout=0):
        yield (made := Path(folder, "new"))
        with suppress(OSError):
            target.rmdir()  # an empty folder
        made.rename(target)
