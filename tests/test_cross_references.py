"""What the documentation names exists: modules, functions, files, headings, and who imports whom."""

import ast
import builtins
import re

from documentation import (
    FILES,
    FOLDERS,
    PAGES,
    ROOT,
    SOURCES,
    anchors,
    exists,
    has_member,
    module_file,
    names_in,
    prose,
)

#: files that are named but are not here, and whose they are
ELSEWHERE = {
    "constants.py": "mlperf-logging",
    "ddlsim/data_files/models": "in the wheel, where models/ goes",
    "ddlsim/data_files/topologies": "in the wheel, where topologies/ goes",
    "ddlsim/data_files/deviations": "in the wheel, where deviations/ goes",
    "docs/faq/perf.md": "MXNet",
}
ROLE = re.compile(r":(func|class|meth|data|mod|attr|exc|obj):`(?:[^`<]*<)?~?([\w.]+)>?`")
DOTTED = re.compile(r"(?<![\w./`:])`{1,2}((?:ddlsim|accuracy)(?:\.\w+)+)(?:\(\))?`{1,2}")
CODE = re.compile(r"`{1,2}([\w./-]+\.(?:py|md|toml))`{1,2}")
PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def resolves(role, target, path, around):
    """Whether a role's target is a module, a name of this file, or a member of a class around it."""
    first = target.split(".")[0]
    if role == "mod" or first in ("ddlsim", "accuracy"):
        return exists(target)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if first in names_in(path):
        return not module_file(module) or exists(f"{module}.{target}")
    if any(has_member(path, owner, first) for owner in around):
        return True
    return hasattr(builtins, first) or exists(target)


def is_here(name):
    """Whether a path, or its end, is that of a file of the project."""
    return name in ELSEWHERE or name in FILES or any(file.endswith(f"/{name}") for file in FILES)


def text_of(page):
    return page.read_text(encoding="utf-8")


def names_any(text):
    return any(pattern.search(text) for pattern in (ROLE, DOTTED, CODE, PATH))


def not_here(text):
    """Return the modules, names in them and files that a text names and that are not here."""
    names = [name for name in DOTTED.findall(text) if not exists(name) and not is_here(name)]
    files = [*PATH.findall(text), *(file for file in CODE.findall(text) if file.endswith(".py"))]
    return [*names, *(file for file in files if not is_here(file))]


def test_what_docstrings_and_comments_name_exists():
    missing = []
    for path in SOURCES:
        if not names_any(text_of(path)):
            continue
        for line, text, around in prose(path, names_any):
            roles = [target for role, target in ROLE.findall(text) if not resolves(role, target, path, around)]
            missing += [f"{path.relative_to(ROOT)}:{line}: {name}" for name in [*roles, *not_here(text)]]
    assert not missing


def test_what_pages_name_exists():
    assert not [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in not_here(text_of(page))]


def test_links_lead_to_pages_and_headings():
    missing = []
    for page in PAGES:
        for target, anchor in LINK.findall(text_of(page)):
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not missing


def test_the_checks_find_what_is_wrong(tmp_path):
    """A function, member, module or heading that is not there is seen; what is there in another way is not."""
    here = ROOT / "ddlsim" / "network" / "network.py"
    network = next(n for n in names_in(here).values() if isinstance(n, ast.ClassDef) and n.name == "Network")
    for target in ("grow", "Network.sent", "ddlsim.Resul", "ddlsim.nn.taps.Taps"):
        assert not resolves("func", target, here, [network])
    for target in ("accounts", "send", "ddlsim.Result.save", "IndexError", "functools.partial"):
        assert resolves("func", target, here, [network])
    assert not resolves("mod", "ddlsim.nn.taps", here, [])
    assert not exists("ddlsim.Result.saved")
    assert not is_here("ddlsim/nn/taps.py")
    (tmp_path / "a.md").write_text("# One, `two`\n\n## Same\n\n## Same\n", encoding="utf-8")
    assert anchors(tmp_path / "a.md") == {"one-two", "same", "same-1"}
