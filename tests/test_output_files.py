"""What ddlsim writes is there whole or not at all, whatever goes wrong while it is written."""

import ast
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from draws import slow

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.measure import save_measurements
from ddlsim.output_files import check_place, check_suffix, replacing, write_text

PACKAGE = Path(ddlsim.__file__).parent


def test_a_file_is_written_and_nothing_lies_beside_it(tmp_path):
    write_text(tmp_path / "new.txt", "höhe\n")
    assert (tmp_path / "new.txt").read_bytes() == "höhe\n".encode()
    assert os.listdir(tmp_path) == ["new.txt"]


@pytest.mark.parametrize(
    "save",
    [
        lambda path: ddlsim.load_device("v100").save(path),
        lambda path: ddlsim.load_stack("megatron").save(path),
        lambda path: ddlsim.Experiment("office-1gbe").save(path),
        lambda path: ddlsim.load_cluster("office-1gbe").save(path),
        lambda path: save_measurements([], path),
    ],
    ids=["device", "stack", "experiment", "cluster", "measurements"],
)
def test_names_that_could_not_be_read_again_are_refused(save, tmp_path):
    for name in ("file.txt", "file"):
        with pytest.raises(ConfigError, match=rf"{name}: cannot write '.*' files; use \."):
            save(tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_may_have_any_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_suffix(tmp_path / "pipe", ".toml")


def test_who_looks_meanwhile_sees_the_old_file(tmp_path):
    path = tmp_path / "old.txt"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("before", [None, "old"], ids=["none", "old"])
def test_what_ends_the_writing_leaves_what_was_there(tmp_path, error, before):
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)

    def interrupted():
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert os.listdir(tmp_path) == ([] if before is None else ["file.txt"])
    assert before is None or path.read_text() == before


@pytest.mark.posix
def test_permissions_are_those_of_the_old_file_or_as_for_any_new_one(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("")
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_text(old, "x")
        write_text(new, "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    new.unlink()
    write_text(new, "x")
    assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~before


@pytest.mark.posix
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to("folder/there.txt")
    for text in ("first", "second"):  # a link to nothing, then to a file
        write_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "folder" / "there.txt").read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["folder", "link.txt"]
    assert os.listdir(tmp_path / "folder") == ["there.txt"]


@pytest.mark.posix
def test_a_link_in_a_circle_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="cannot be written: Too many levels of symbolic links"):
        write_text(tmp_path / "a", "x")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_long_name_is_no_problem_for_what_lies_beside(tmp_path):
    write_text(tmp_path / ("n" * 255), "x")
    with pytest.raises(ConfigError, match="File name too long; choose a shorter name"):
        write_text(tmp_path / ("n" * 256), "x")
    assert os.listdir(tmp_path) == ["n" * 255]


@pytest.mark.parametrize("ask", [check_place, lambda path: write_text(path, "x")], ids=["before", "then"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("folder", "folder: cannot be written: Is a folder; specify a file in it"), ("none/x", "cannot be written: "),
     ("file/x", "cannot be written: ")],
    ids=["folder", "missing", "file"],
)  # fmt: skip
def test_places_where_no_file_can_be(tmp_path, ask, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        ask(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.posix
def test_a_named_pipe_is_written_to(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_place(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join()
    assert got == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout")
@pytest.mark.parametrize("to_file", [False, True], ids=["pipe", "file"])
def test_stdout_gets_it_in_its_place(tmp_path, to_file):
    """Also where the shell has led it to a file, which must not be replaced: more goes there."""
    code = (
        "from ddlsim.output_files import write_text; print('before', flush=True); "
        "write_text('/dev/stdout', 'in it\\n'); print('after')"
    )
    with (tmp_path / "out").open("w+") as file:
        out = file if to_file else subprocess.PIPE
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out, check=True, text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        )  # fmt: skip
        file.seek(0)
        assert (file.read() if to_file else done.stdout) == "before\nin it\nafter\n"


# ---------------------------------------------------------------- a full disk


@contextmanager
def limited(nbytes):
    """Let no file grow beyond `nbytes`: writing then ends as on a full disk, part of it done."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def writers():
    """Return what writes each kind of file, and a name for it."""
    from ddlsim.study import Study

    training = ddlsim.Training("digits", updates=3, rate=0.1)
    result = ddlsim.simulate("office-1gbe", "digits-cnn", batch_size=8, workers=2, training=training)
    table = Study(ddlsim.Experiment("office-1gbe", "lenet5", steps=1, warmup=0), {"workers": [1, 2, 3]}).run(jobs=1)
    return {
        "trace.json": result.save_trace, "result.json": result.to_json, "timeline.png": result.plot_timeline,
        "timeline.svg": result.plot_timeline, "timeline.pdf": result.plot_timeline, "run.npz": result.save,
        "cluster.json": result.cluster.save, "cluster.graphml": result.cluster.save, "report.html": table.save_html,
        "table.csv": table.save, "table.json": table.save, "table.parquet": table.save,
    }  # fmt: skip


@pytest.fixture(scope="module")
def write():
    return writers()


NAMES = [
    "trace.json",
    "result.json",
    "timeline.png",
    "timeline.svg",
    slow("timeline.pdf"),
    "run.npz",
    "cluster.json",
    "cluster.graphml",
    slow("report.html"),
    "table.csv",
    "table.json",
    slow("table.parquet"),
]


@pytest.mark.posix
@pytest.mark.parametrize("name", NAMES)
def test_on_a_full_disk_the_old_file_stays(write, name, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pip install 'ddlsim[parquet]'")
    path = tmp_path / name
    write[name](path)
    assert path.stat().st_size > 200, "too short to be cut"
    path.write_text("old")
    with limited(100), pytest.raises(ConfigError) as raised:
        write[name](path)
    assert str(raised.value).startswith(f"{path}: cannot be written: File too large; raise the limit")
    assert "\n" not in str(raised.value)
    assert path.read_text() == "old"
    path.unlink()
    with limited(100), pytest.raises(ConfigError):
        write[name](path)
    assert os.listdir(tmp_path) == []
    write[name](path)  # and it can be written again
    assert os.listdir(tmp_path) == [name]


def test_the_reason_and_what_to_do_are_said(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError) as raised:
        write_text(tmp_path / "x", "text")
    end = "/x: cannot be written: No space left on device; free some space, or choose another folder"
    assert str(raised.value).endswith(end)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, where this machine lets one be made."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_real_full_disk(write, small_disk):
    write_text(small_disk / "trace.json", "old")
    (small_disk / "rest").write_bytes(bytes(56 * 1024))
    with pytest.raises(ConfigError, match="No space left on device; free some space, or choose another folder"):
        write["trace.json"](small_disk / "trace.json")
    assert sorted(os.listdir(small_disk)) == ["rest", "trace.json"]
    assert (small_disk / "trace.json").read_text() == "old"


def test_a_real_disk_that_cannot_be_written(small_disk):
    (small_disk / "old").write_text("old")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for name in ("old", "new"):
        with pytest.raises(ConfigError, match="cannot be written: "):
            check_place(small_disk / name)
        with pytest.raises(ConfigError, match="Read-only file system; choose another path"):
            write_text(small_disk / name, "x")


# ---------------------------------------------------------------- the rule holds in all of ddlsim

#: methods and functions that write what their first argument says
WRITERS = {
    "savefig", "savez", "savez_compressed", "savetxt", "tofile", "to_csv", "to_parquet", "to_json", "to_html",
    "to_excel", "to_pickle", "to_feather", "write_graphml", "dump", "imwrite", "imsave",
}  # fmt: skip
ALWAYS = {"write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "copyfile", "copy2", "fdopen"}
SUSPECT = re.compile(rf"\b({'|'.join({'open', *WRITERS, *ALWAYS})})\b")
#: file -> what it may call: /dev/null; where files are written, rows appended, a store copied to where it can be read
MAY = {
    "cli/application.py": {"open"}, "output_files.py": {"open", "fdopen", "write_text"}, "measure/table.py": {"open"},
    "study/store.py": {"copyfile"}, "machine_code.py": {"write_bytes"},  # which it then renames
}  # fmt: skip


def direct_writes(path):
    """Yield the calls in a file that would write to a path themselves."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text))) if SUSPECT.search(text) else []
    files = {
        item.optional_vars.id
        for node in nodes
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and called(item.context_expr) == "replacing"
    }
    files |= {
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign) and called(node.value) in ("BytesIO", "StringIO")
        and isinstance(node.targets[0], ast.Name)
    }  # fmt: skip
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "ddlsim.output_files"
        for alias in node.names
    }
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        name = called(node)
        if name == "open" and writes(node):
            yield name, node.lineno
        elif name in WRITERS and isinstance(node.func, ast.Attribute) and name not in defined:
            at_file = any(isinstance(argument, ast.Name) and argument.id in files for argument in node.args[:2])
            as_text = not node.args or (isinstance(node.args[0], ast.Constant) and node.args[0].value is None)
            pickler = name == "dump" and len(node.args) == 1  # has its file already
            if not (at_file or as_text or pickler):
                yield name, node.lineno
        elif name in ALWAYS and name not in imported:
            yield name, node.lineno


def called(node):
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def writes(call):
    """Tell whether a call of open() or path.open() may write."""
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if owner == "os":
        return any(word in ast.unparse(call) for word in ("O_WRONLY", "O_RDWR", "O_CREAT"))
    place = 1 if isinstance(call.func, ast.Name) or owner == "gzip" else 0
    mode = next((k.value for k in call.keywords if k.arg == "mode"), None)
    mode = mode or (call.args[place] if len(call.args) > place else None)
    text = mode.value if isinstance(mode, ast.Constant) else ""
    return isinstance(text, str) and bool(set("wax+") & set(text))


def test_nothing_is_written_but_whole():
    """All of the package writes through ddlsim.output_files."""
    found = {path.relative_to(PACKAGE).as_posix(): direct_writes(path) for path in sorted(PACKAGE.rglob("*.py"))}
    calls = [(file, *call) for file, calls in found.items() for call in calls]
    assert not [(file, name, line) for file, name, line in calls if name not in MAY.get(file, ())]


@pytest.mark.parametrize(
    "line",
    ["Path(p).write_text(t)", "open(p, 'w')", "p.open('a')", "p.open(mode='xb')", "f.savefig(p)", "d.to_csv(p)",
     "np.savez(p, a=1)", "json.dump(d, p)", "tempfile.mkstemp()", "os.open(p, os.O_WRONLY)", "nx.write_graphml(g, p)"],
)  # fmt: skip
def test_the_rule_finds_what_breaks_it(tmp_path, line):
    (tmp_path / "module.py").write_text(f"def f(p):\n    {line}\n")
    assert [found for _, found in direct_writes(tmp_path / "module.py")] == [2]
