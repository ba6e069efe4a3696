"""Python skips the last garbage collections, unless an application's objects would notice."""

import subprocess
import sys
import textwrap

import pytest


def output(code: str) -> str:
    """Run code after an import of the package; return what it prints, including what Python says while it exits."""
    done = subprocess.run(
        [sys.executable, "-c", "import ddlsim.garbage\n" + textwrap.dedent(code)], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def is_skipped(code: str) -> bool:
    """Return whether the last collections are skipped after running code."""
    first = "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
    script = f"{first}import ddlsim.garbage\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {"True\n": True, "False\n": False}[done.stdout]


def test_the_last_collections_are_skipped_if_only_memory_is_freed():
    assert is_skipped("")
    assert is_skipped("ended = (i for i in range(3)); list(ended)")
    assert not is_skipped("file = open('/dev/null', 'w')")


@pytest.mark.parametrize(
    "code",
    [
        "import io, sys; sys.__stdout__ = io.StringIO()",
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach())",
        """
        class Unhashable(type):
            def __eq__(self, other): return self is other
        class Its(metaclass=Unhashable):
            pass
        kept = [Its()]
        kept.append(kept)
        """,
        """
        class WithoutModule:
            __module__ = None
            def __del__(self): pass
        kept = [WithoutModule()]
        kept.append(kept)
        """,
    ],
)
def test_python_exits_silently_with_unusual_objects(code):
    assert output(code) == ""


@pytest.mark.parametrize(
    "code",
    [
        """
        def waiting():
            try:
                yield
            finally:
                print("finalized")
        kept = [waiting()]
        next(kept[0])
        """,
        """
        class Object:
            def __del__(self):
                print("finalized")
        kept = [Object()]
        """,
    ],
)
def test_finalizers_of_objects_in_cycles_run(code):
    assert output(textwrap.dedent(code) + "kept.append(kept)\n") == "finalized\n"


def test_objects_of_imported_modules_move_to_the_oldest_generation():
    """Only if modules were imported: what else was made in the meantime is collected as usual."""
    code = """
        import gc
        gc.collect()
        kept = []

        @ddlsim.garbage.postponed()
        def made(module):
            __import__(module)
            kept.append([])
            return any(each is kept[-1] for each in gc.get_objects(generation=0))

        print(made("sys"), any(each is kept[-1] for each in gc.get_objects(generation=0)), gc.isenabled())
        print(made("wave"), any(each is kept[-1] for each in gc.get_objects(generation=2)), gc.isenabled())
    """
    assert output(code) == "True True True\nTrue True True\n"
