"""Files that have their name only once they are whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def part_of(path: Path, owner: object) -> Path:
    """The passing name, beside the file's own."""
    return path.with_name(f".{path.name}.{os.getpid()}-{id(owner)}.part")


def cannot_write(path: Path, error: OSError) -> OSError:
    """The same error, in a sentence."""
    reason = error.strerror or str(error)
    return type(error)(error.errno, f"cannot write {path}: {reason}; nothing is left of it")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears at ``path`` when the block ends, and not at all if that fails.

    Raises:
        OSError: it cannot be written; the message says so in a sentence.
    """
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    part = part_of(path, path)
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
