"""Names of files: ddlsim's own, names with options, and the names from which objects were loaded.

The bundled files are in `models/`, `topologies/` and `deviations/`. In a checkout, these folders are next to the
package; in a wheel, they are inside it, under `data_files/`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar, cast

from ddlsim.errors import ConfigError

T = TypeVar("T")
_PACKAGE = Path(__file__).resolve().parent
_TEXT = "loaded from"


def bundled_files(folder: str) -> dict[str, Path]:
    """Return the bundled `*.toml` files of `folder` ("models", "topologies" or "deviations") by name, in sorted order.

    Raises :class:`ConfigError` if the folder is missing, which means that the installation is broken.
    """
    # The wheel's copy comes first: next to an installed package, "models" may belong to another project.
    for root in (_PACKAGE / "data_files" / folder, _PACKAGE.parent / folder):
        if root.is_dir():
            names = sorted(name for name in os.listdir(root) if name.endswith(".toml"))
            return {name.removesuffix(".toml"): root / name for name in names}
    raise ConfigError(f"the bundled folder {folder!r} was not found next to {_PACKAGE}; reinstall ddlsim")


def split_options(text: str, folder: Path = Path()) -> tuple[str, list[str]]:
    """Split a text like ``name+option+key=value`` into the name or path and the options.

    Names of files and folders can contain a plus: the longest prefix that is a file (in `folder`) is used.
    """
    ends = [*(i for i, character in enumerate(text) if character == "+"), len(text)]
    end = next((i for i in reversed(ends) if os.path.isfile(os.path.join(folder, text[:i]))), ends[0])
    return text[:end], text[end + 1 :].split("+") if end < len(text) else []


def relative_name(name: str | Path, folder: Path) -> str:
    """Return the name of a file or folder (with options) as used by a file in `folder`.

    Names that are not paths of existing files or folders, and absolute paths, are returned unchanged.
    """
    text = str(name)
    stem, options = split_options(text)
    if os.path.isabs(stem):
        return text
    if not ((Path(stem).suffix or "/" in stem) and os.path.isfile(stem)):
        if not ("/" in text and os.path.isdir(text)):
            return text
        stem, options = text, []
    try:
        path = os.path.relpath(stem, folder)
    except ValueError:  # on another drive in Windows
        path = os.path.abspath(stem)
    if os.path.isdir(stem) and not os.path.dirname(path):
        path = f"./{path}"  # a slash marks the name as a path
    return "+".join((path, *options))


def loaded_from(value: T, source: object) -> T:
    """Record the name or path from which an object was loaded, and the working directory; return the object.

    source  the name or path, or an object that has one. Copies, such as those by ``dataclasses.replace``, have none.
    """
    text = source if isinstance(source, str | Path) else text_of(source)
    if text is not None:
        vars(value)[_TEXT] = text, _working_folder()
    return value


def _working_folder() -> str:
    """Return the working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def text_of(value: object) -> str | Path | None:
    """Return the name or path from which an object was loaded; None if it was not."""
    text, folder = cast("tuple[str | Path | None, str]", getattr(value, "__dict__", {}).get(_TEXT, (None, "")))
    at = Path(folder)
    if text is None or folder == _working_folder() or not os.path.isfile(at / split_options(str(text), at)[0]):
        return text
    return at / text  # the working directory has changed
