"""The application that the commands register with, and its entry point."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import ddlsim
from ddlsim.errors import DdlsimError, nearest
from ddlsim.printable import shown

#: typer's usage errors; newer versions contain click, older ones depend on it
_UsageError: type[Any] = typer.BadParameter.__mro__[1]
#: names of the commands in other tools and on other pages
_CALLED = {
    "cluster": "topology", "network": "topology", "clusters": "topologies", "networks": "topologies", "gpus": "devices",
    "collectives": "algorithms", "simulate": "run", "study": "sweep", "plan": "recommend", "memory": "fits",
}  # fmt: skip


@contextmanager
def _in_a_line(context: Any) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        text, near = error.format_message(), ""
        if "\n" in text:  # the help, as no command was given
            raise
        context = error.ctx or context
        command = context.command_path
        if text.startswith("No such command"):
            word = next(iter(text.split("'")[1:2]), "")
            commands = getattr(context.command, "commands", ())
            text = f"No such command '{word}'"
            near = _CALLED[word] if _CALLED.get(word) in commands else nearest(word, commands)
        elif text.startswith("No such option: --"):
            from ddlsim.imports.megatron import is_argument

            word = text.removeprefix("No such option: --").partition(" ")[0]
            text, near = f"No such option: --{word}", _meant(word, context)
            if near and not near.startswith("-"):
                text, near = f"{text}; set {near} in an experiment file ({command} FILE.toml)", ""
            if is_argument(word) and any(argument.param_type_name == "argument" for argument in context.command.params):
                text, near = f"{text}; to pass Megatron-LM arguments, write {command} -- '--{word} ...'", ""
        for problem in getattr(error.__cause__, "errors", tuple)():  # those of pydantic do not contain the value
            text = text.replace(problem["msg"], f"{problem['input']!r}: must be{problem['msg'].partition(',')[0][15:]}")
        see = f"; did you mean '{near}'? See" if near else "; see"
        raise DdlsimError(f"{command}: {text[0].lower()}{text[1:].rstrip('.?')}{see} {command} -h") from None


def _meant(word: str, context: Any) -> str:
    """Return the option that was probably meant, or the field of an experiment that has no option."""
    options = [name[2:] for parameter in context.command.params for name in parameter.opts if name[:2] == "--"]
    near, start = nearest(word, options, 0.6), word.replace("-", "_")
    takes_file = any(parameter.name == "cluster_or_file" for parameter in context.command.params)
    if takes_file and len(word) > 2 and not near.startswith(word):
        others = [
            field.name for field in dataclasses.fields(ddlsim.Experiment) if field.name.replace("_", "-") not in options
        ]
        if fields := [name for name in others if name.startswith(start) or start.startswith(name)]:
            return fields[0]
    return near and f"--{near}"


class Commands(TyperGroup):
    """A command group that reports usage errors as one line, like a DdlsimError."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the options of all commands."""
        with _in_a_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            with _in_a_line(ctx):
                return super().invoke(ctx)
        except KeyboardInterrupt:  # which typer turns into an exit without a message
            _fail("interrupted", 130)


app = typer.Typer(
    cls=Commands,
    help="Simulate distributed training on a cluster before renting it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
show = typer.Typer(help="Show a topology, a plan or a model in detail.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(show, name="show")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(ddlsim.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Simulate distributed training on a cluster before renting it."""


def _fail(message: str, code: int) -> NoReturn:
    with suppress(OSError):  # stderr may be closed or on a full disk, too
        print(shown(message), file=sys.stderr, flush=True)
    sys.exit(code)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning like an error, without the source line that it comes from."""
    with suppress(OSError):
        print(shown(f"warning: {message}"), file=sys.stderr, flush=True)


def _forget_stdout() -> None:
    """Discard pending output on stdout, so that the interpreter does not try to write it again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command-line program ``ddlsim``.

    An error is printed to stderr as a single line, and the exit code is 2. After an interrupt (Ctrl-C), the exit code
    is 130. If the output pipe is closed (as in ``ddlsim models | head -1``), the program ends without a message.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the encoding lacks must not cause errors
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                app(prog_name="ddlsim")
        finally:
            if sys.stdout is not None:  # closed, as in ``ddlsim models >&-``
                sys.stdout.flush()
    except DdlsimError as error:
        _fail(f"error: {error}", 2)
    except MemoryError:
        _fail("error: not enough memory; simulate fewer workers, smaller data or a smaller model", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _forget_stdout()
        sys.exit(0)
    except OSError as error:
        _forget_stdout()
        what = "the output" if error.filename is None else error.filename
        _fail(f"error: {what}: {error.strerror or error}", 2)
