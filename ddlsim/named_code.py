"""Import of code by name, ``"package.module:Name"``, as in files and on command lines."""

from __future__ import annotations

import importlib

from ddlsim.errors import ConfigError


def names_code(name: object) -> bool:
    """Return whether a name refers to code to be imported."""
    return isinstance(name, str) and ":" in name


def imported(name: str, where: str, form: str = "Name") -> object:
    """Return the object named ``"package.module:Name"``; importing the module runs it.

    where   name of the setting, for messages
    form    kind of object after the colon, for messages

    Raises ConfigError if the module, or the name in it, does not exist.
    """
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        remedy = f"expected 'package.module:{form}', with its folder in PYTHONPATH"
        raise ConfigError(f"{where} {name!r}: {error}; {remedy}") from None
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{where} {name!r}: {error}; expected 'package.module:{form}'") from None
