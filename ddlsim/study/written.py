"""Studies as text: the file that :func:`ddlsim.study.load_study` reads as one, and the program that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddlsim.run.written import key_text, python_of, python_text, told, told_fields, toml_lines, toml_text
from ddlsim.study.designs import Range, paths_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddlsim.study.study import Study

#: fields of a study beside its base and what is varied -> what they are by default
_OPTIONS = {"seeds": 1, "design": "grid", "n_points": None, "design_seed": 0, "stability": False}


def toml_of(study: Study) -> str:
    """Return the file that describes the study. Raises ConfigError for what files cannot say: objects of one's own."""
    lines = [f"{name} = {toml_text(value)}" for name, value in _options(study).items()]
    lines += ["", "[base]", *toml_lines(told_fields(study.base), "base."), "", "[vary]"]
    lines += [f"{key_text(key)} = {toml_text(_taken(key, values))}" for key, values in study.vary.items()]
    return "\n".join([*lines, ""]).lstrip("\n")


def python_of_study(study: Study) -> str:
    """Return a program that makes the study, runs it and prints its table. Raises ConfigError for clusters and models
    that are objects."""
    varied = [f"    {key!r}: {python_text(values, key)},\n" for key, values in study.vary.items()]
    ranges = "import ddlsim.study\n" if any(isinstance(values, Range) for values in study.vary.values()) else ""
    more = "".join(f", {name}={value!r}" for name, value in _options(study).items())
    return (
        f"import ddlsim\n{ranges}\nbase = {python_of(study.base)}\n"
        f"vary = {{\n{''.join(varied)}}}\n\nif __name__ == \"__main__\":\n"
        f"    print(ddlsim.Study(base, vary{more}).run())\n"
    )


def _options(study: Study) -> Mapping[str, object]:
    """Return the options that differ from their defaults."""
    found = {name: getattr(study, name) for name in _OPTIONS}
    found["seeds"] = found["seeds"] if isinstance(found["seeds"], int) else list(found["seeds"])
    return {name: value for name, value in found.items() if value != _OPTIONS[name]}


def _taken(key: str, values: object) -> object:
    """Return what stands in a file for the values of a field, or of several together."""
    paths = paths_of(key)
    if isinstance(values, Range):
        flags = {name: True for name in ("log", "whole") if getattr(values, name)}
        return {"low": values.low, "high": values.high, **flags}
    if isinstance(values, dict):
        return {name: _one(key, paths, value) for name, value in values.items()}
    assert isinstance(values, list | tuple)
    return [_one(key, paths, value) for value in values]


def _one(key: str, paths: list[str], value: object) -> object:
    if len(paths) > 1 and isinstance(value, list | tuple):
        return [_one(path, [path], each) for path, each in zip(paths, value, strict=True)]
    return "none" if value is None else told(paths[0].rpartition(".")[2], value, f"vary[{key!r}]")
