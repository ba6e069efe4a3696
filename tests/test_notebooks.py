"""The notebooks in examples/notebooks: stored without outputs, and every cell of them runs."""

import json
import os
import re
from pathlib import Path

import pytest
from test_cross_references import LINK

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STRICT = "import warnings\nwarnings.simplefilter('error')"


def cells(path, kind):
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_what_they_print(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert set(stored["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_begin_with_a_title_and_end_with_what_to_try_next(path):
    texts = ["".join(cell["source"]) for cell in cells(path, "markdown")]
    assert texts[0].startswith("# ")
    assert texts[-1].rpartition("## What to try next\n")[2].strip().startswith("- ")
    for text in texts:
        for target, _ in LINK.findall(text):
            assert (FOLDER / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, monkeypatch):
    """In a kernel of its own, in which warnings are errors."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    errors = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    lines = [line for text in errors for line in text.splitlines()]
    assert [line for line in lines if not line.startswith("ddlsim: ")] == []  # which it says while it compiles
    shown = [output.data for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    html = [data["text/html"] for data in shown if "text/html" in data]
    assert any("<table" in text for text in html)
    assert not re.search(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=\"(?!data:)", "".join(html))
