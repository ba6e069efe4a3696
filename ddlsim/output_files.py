"""Atomic output files: written to a temporary file first, then moved into place.

Readers see either the old file or the new one. On a full disk, after Ctrl-C or a crash, the old file (if any) is still
there, and no temporary file is left. All of ddlsim's output is written in this way, except for rows appended to a table
of measurements (:mod:`ddlsim.measure.table`).
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ddlsim.errors import ConfigError
from ddlsim.printable import shown
from ddlsim.units import as_number

if TYPE_CHECKING:
    import pandas as pd


#: error -> remedy
_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EFBIG: "raise the limit (ulimit -f), or choose another folder",
    errno.EISDIR: "specify a file in it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "create the folder first",
    errno.ENOTDIR: "choose another folder",
}


def check_suffix(path: str | Path, *suffixes: str) -> None:
    """Raise ConfigError for a suffix that ddlsim's files do not have; /dev/stdout and pipes are exempt."""
    path = Path(path)
    if path.suffix not in suffixes and (os.path.isfile(path) or os.path.isdir(path) or not os.path.exists(path)):
        raise ConfigError(f"{path}: cannot write {path.suffix!r} files; use {' or '.join(suffixes)}")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8; see :func:`replacing`."""
    with replacing(path) as file:
        # a lone surrogate, which JSON may contain, cannot be encoded in UTF-8
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` when the block ends without an error.

    A symbolic link is kept, and its target is replaced; the permissions and, if possible, the owner of the old file are
    kept. Targets that are not regular files (``/dev/stdout``, a named pipe) are written when the block has ended.
    Raises a one-line :class:`ConfigError` with path, reason and remedy; BrokenPipeError if nothing reads a pipe.
    """
    path = Path(path)
    try:
        stream = _stream(path)
        with _replacing(Path(os.path.realpath(path))) if stream is None else _into(stream) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_be_written(path, error) from None


def check_place(path: str | Path) -> None:
    """Check before long work that its output can be written at `path`. Raises :class:`ConfigError`."""
    path = Path(path)
    folder = Path(os.path.realpath(path)).parent
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: the folder {str(path.parent)!r} does not exist; create it first")
    try:
        stream = _stream(path, just_look=True)
    except OSError as error:
        raise cannot_be_written(path, error) from None
    if stream is None and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{path}: cannot be written: no permission to create files in {str(folder)!r}; choose another folder"
        )


def cannot_be_written(path: str | Path, error: OSError) -> ConfigError:
    """Return the error for a file that could not be written, with the reason and the remedy."""
    remedy, reason = _REMEDIES.get(error.errno or 0, "choose another path"), error.strerror or error
    return ConfigError(f"{path}: cannot be written: {reason}; {remedy}")


def _stream(path: Path, *, just_look: bool = False) -> int | None:
    """Return a descriptor if `path` is not a regular file, or is our own stdout; None for other files.

    Raises OSError for folders and write-protected files. With `just_look`, nothing is opened (0).
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(there.st_mode):
        raise OSError(errno.EISDIR, "Is a folder")
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(there, os.fstat(descriptor)):
                return 0 if just_look else os.dup(descriptor)
    if stat.S_ISREG(there.st_mode):
        os.close(os.open(path, os.O_WRONLY))  # write-protected files must not be replaced
        return None
    return 0 if just_look else os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))


@contextmanager
def _into(stream: int) -> Iterator[BinaryIO]:
    """Yield a buffer that is written to the stream at the end, because pictures and archives are written with seeks."""
    with os.fdopen(stream, "wb") as out:
        buffer = io.BytesIO()
        yield buffer
        out.write(buffer.getbuffer())


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of `target`, which is moved into place at the end, or removed."""
    partial = target.with_name(f".{target.name[:40]}.{os.getpid()}-{os.urandom(4).hex()}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            _keep_permissions(file.fileno(), target)
            os.fsync(file.fileno())  # after a crash of the computer, the new name must not be an empty file
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _keep_permissions(handle: int, target: Path) -> None:
    """Copy owner and permissions of the replaced file to the new one."""
    if not hasattr(os, "fchown"):
        return
    try:
        old = target.stat()
    except FileNotFoundError:
        return
    with suppress(OSError):  # only root may change owners
        os.fchown(handle, old.st_uid, old.st_gid)
    with suppress(OSError):
        os.fchmod(handle, stat.S_IMODE(old.st_mode))


def csv_text(frame: pd.DataFrame) -> str:
    """Return the rows of a frame as CSV, without its index; texts that look like formulas are escaped
    (:mod:`ddlsim.output_files`)."""
    safe = frame.astype(object).map(lambda cell: guarded(cell) if isinstance(cell, str) else cell)
    safe.columns = [guarded(str(name)) for name in frame.columns]
    return str(safe.to_csv(index=False, lineterminator="\n"))


def save_csv(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the rows of a frame like :func:`csv_text`. Raises ConfigError if the file cannot be written."""
    write_text(path, csv_text(frame))


def json_rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of a frame as values for JSON, with all digits; missing and infinite numbers are None."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [
        {str(name): None if isinstance(value, float) and math.isinf(value) else value for name, value in row.items()}
        for row in rows
    ]


_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")


def guarded(text: str) -> str:
    """Escape `text` so that no program interprets it as a formula."""
    text = shown(text)
    is_number = text[:1] in "+-" and as_number(text) is not None
    return f"'{text}" if _FORMULA.match(text) and not is_number else text


def unguarded(cell: str) -> str:
    """Undo :func:`guarded` (control characters stay escaped)."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
