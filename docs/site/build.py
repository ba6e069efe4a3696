"""Build the documentation site: ``python docs/site/build.py``. Warnings are errors, and no network is needed."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pages import ROOT, stage

OUT = ROOT / "out"


def build(out: Path = OUT) -> int:
    """Write the site into ``out/site`` and return the exit code of Sphinx."""
    source = out / "site-source"
    stage(source)
    trees = out / "site-trees"
    here = Path(__file__).parent
    if trees.exists() and max(os.stat(path).st_mtime for path in here.glob("*.py")) > os.stat(trees).st_mtime:
        shutil.rmtree(trees)  # what pages become depends on these programs, which Sphinx does not know
    command = [
        sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--keep-going", "--quiet",
        "--jobs", "auto", "--conf-dir", str(here), "--doctree-dir", str(trees),
        "--define", f"nb_execution_cache_path={_cache(out / 'site-notebooks')}", str(source), str(out / "site"),
    ]  # fmt: skip
    code = subprocess.run(command, check=False).returncode
    if code:  # what has been read is not read again, and would not be warned of
        shutil.rmtree(trees, ignore_errors=True)
    return code


def _cache(folder: Path) -> Path:
    """Return where the outputs of notebooks are kept, which hold for one state of what notebooks use."""
    digest = hashlib.sha256()
    for part in ("ddlsim", "models", "topologies", "deviations", "examples/notebooks"):
        for path in sorted((ROOT / part).rglob("*.*")):
            if path.suffix in (".py", ".pyi", ".toml", ".csv"):
                digest.update(path.read_bytes())
    cache = folder / digest.hexdigest()[:16]
    for old in set(folder.glob("*")) - {cache}:
        shutil.rmtree(old)
    return cache


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder in which site/ and what it is made from go")
    sys.exit(build(parser.parse_args().out.resolve()))
