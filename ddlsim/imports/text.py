"""Text files of other tools, without launcher prefixes, and errors that include the line."""

from __future__ import annotations

import gzip
import io
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddlsim import plain
from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, shown
from ddlsim.units import LARGEST, as_number, in_range

#: tolerated number of invalid characters in a log: this many, and this share of all
FEW, MOST_BROKEN = 10, 0.01

_PREFIX = re.compile(
    r"""\x1b\[[0-9;]*m                                  # colours and underlining
      | \s*(?:\w{3}[ ]\w{3}[ ]+\d+[ ][\d:]{8}[ ]\d{4})?(?:\[(?:[\w.-]+@)?\d+,\d+\])?<(?:stdout|stderr|stddiag)>:?[ ]?
                                                        # mpirun --tag-output, --timestamp-output, horovodrun
      | \s*\[\d+\][ ]                                   # mpiexec -prepend-rank
      | \s*\d+:[ ]                                      # srun --label
      | \s*[A-Za-z][\w.-]*:[ ](?=[\s\d#\[:=]|GPU\d)    # pdsh; not "PING host", not "name: text"
      | \s*[\w.-]+[ ]+\|[ ]                             # docker compose
      | \s*\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\w.,:+-]*[ ]  # a date
    """,
    re.VERBOSE,
)
#: one-byte encodings declared in XML of older programs
_DECLARED = re.compile(rb"""\s*<\?xml[^>]{0,80}encoding=["']((?i:iso-8859-\d+|windows-\d+|latin-?1|us-ascii))["']""")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ReadingWarning(UserWarning):
    """Something in a file was skipped or assumed; the message contains the file and the count."""


def warn(message: str) -> None:
    """Issue a ReadingWarning."""
    warnings.warn(message, ReadingWarning, stacklevel=3)


class EntryError(ConfigError):
    """Error in one entry (a row, an event); the other entries of the file can be used."""


class LeftOut:
    """Collects errors of skipped entries: ``with left_out: ...`` catches an error of this `kind`."""

    def __init__(self, kind: type[ConfigError] = EntryError) -> None:
        self.kind = kind
        self.errors: list[ConfigError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, self.kind):
            self.errors.append(error)
        return isinstance(error, self.kind)

    def tell(self, kept: object, source: SourceText | None = None, nothing: str = "") -> None:
        """Warn how many entries were skipped, and why the first; if none were `kept`, raise its error or `nothing`."""
        if not kept and (self.errors or source is not None):
            raise self.errors[0] if self.errors or source is None else source.error(None, nothing)
        if self.errors:
            entries = "1 entry" if len(self.errors) == 1 else f"{len(self.errors)} entries"
            first_error = self.errors[0]
            warn(f"skipped {entries}; first error: {first_error}")


@dataclass(frozen=True)
class SourceText:
    """The text of a file, the path of the file, and any notes made while reading it.

    The notes are copied to every result that is derived from the file.
    """

    path: Path
    text: str
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (line number from 1, line) pairs, without launcher prefixes and trailing spaces."""
        for number, line in enumerate(self.text.splitlines(), start=1):
            line = _COLOUR.sub("", line)
            for _ in range(3):  # such as a collector's date before a launcher's rank
                match = _PREFIX.match(line)
                line = line[match.end() :] if match else line
            yield number, line.rstrip()

    def error(self, line: int | None, reason: str) -> ConfigError:
        """Return an error with `reason` (rule and remedy) at `line`, or for the whole file if `line` is None."""
        place = f"{self.path}:{line}" if line is not None else f"{self.path}"
        return ConfigError(f"{place}: {reason}")

    def entry_error(self, line: int, reason: str) -> EntryError:
        """Return an error with `reason` for the entry at `line`."""
        return EntryError(f"{self.path}:{line}: {reason}")


def read_bytes(path: Path) -> bytes:
    """Return the contents of the file `path`, decompressed if it is gzip."""
    data = plain.read_bytes(path, "no such file; check the path")
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(plain.MAX_NBYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; is the file complete?") from None
    if len(data) > plain.MAX_NBYTES:
        raise ConfigError(f"{path}: is larger than {plain.MAX_NBYTES >> 20} MiB; extract the part to read")
    return data


@checked
def read_text(path: str | Path, *, log: bool = False) -> SourceText:
    """Read a text file, which may be compressed with gzip.

    log   whether the file is line-by-line program output. If such a file contains only a few bytes that are not valid
          UTF-8, they are replaced and the result includes a note. In other files, invalid bytes raise an error, because
          replacing them could change the data in XML or JSON.

    Raises :class:`ConfigError` if the file cannot be read, is not text, or is larger than 1 GiB.
    """
    path = Path(path)
    data = read_bytes(path)
    notes: tuple[str, ...] = ()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-16":
            problem = f"not a text file ({error.reason}, byte {error.start})"
            raise ConfigError(f"{path}: {problem}; is it complete?") from None
        if declared := _DECLARED.match(data):
            text = data.decode(declared[1].decode(), errors="replace")
        else:
            text, notes = _replaced(path, data, error, log)
    if "\0" in text:
        raise ConfigError(f"{path}: not a text file (it contains zero bytes); is it the right file?")
    return SourceText(path, text, notes)


def _replaced(path: Path, data: bytes, error: UnicodeDecodeError, log: bool) -> tuple[str, tuple[str, ...]]:
    """Return the text of a log with U+FFFD in place of invalid bytes, and a note."""
    at = len(data) - len(error.object) + error.start  # the decoder skips a byte order mark
    line = data.count(b"\n", 0, at) + 1
    text = data.decode("utf-8-sig", errors="replace")
    n = text.count("\ufffd")
    if not log or n > FEW + MOST_BROKEN * len(text):
        raise ConfigError(f"{path}: line {line}: invalid UTF-8 (byte {at}, 0x{data[at]:02x}); is it the right file?")
    return text, (f"{path}: {n} invalid characters replaced, the first in line {line} (byte {at})",)


def positive_number(source: SourceText, line: int, value: str, what: str) -> float:
    """Convert the string `value` to a finite, positive float.

    source, line  file and line number of the string, for the error message
    what          name of the quantity, for the error message

    Raises EntryError, giving the file, line, name and value, if the conversion fails.
    """
    number = nonnegative_number(source, line, value, what)
    if number == 0.0:
        raise source.entry_error(line, f"{what} = {shown(value)} must be above 0; remove this row")
    return number


def nonnegative_number(source: SourceText, line: int, value: str, what: str) -> float:
    """Convert the string `value` to a finite, non-negative float, like :func:`positive_number`."""
    number = as_number(value)
    if number is None:
        raise source.entry_error(line, f"{what} = {shown(value)} is not a number; is the line complete?")
    if not (number >= 0.0 and in_range(number)):
        rule = f"must be from 0 to {LARGEST:g}"
        raise source.entry_error(line, f"{what} = {shown(value)} {rule}; remove this row")
    return number
