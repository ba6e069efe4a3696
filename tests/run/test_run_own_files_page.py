"""The files that docs/formats/own_files.md shows can be read."""

import re
from pathlib import Path

import pytest

import ddlsim
from ddlsim.cluster.files import GENERATORS
from ddlsim.data import from_arrays
from ddlsim.workload.layers import LAYER_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "formats" / "own_files.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```toml (\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_file_of_the_page_can_be_read(number: int, tmp_path: Path) -> None:
    kind, text = BLOCKS[number]
    path = tmp_path / f"{kind}.toml"
    path.write_text(text, encoding="utf-8")
    if kind == "cluster":
        result = ddlsim.simulate(path, "lenet5", workers=4, steps=1)
    elif kind == "model":
        data = from_arrays([[[[0.5] * 28] * 28]] * 4, [0, 1, 2, 3])
        training = ddlsim.Training(data, updates=1, held_out=2)
        result = ddlsim.simulate("office-1gbe", path, batch_size=1, workers=2, training=training)
    else:
        result = ddlsim.simulate(ddlsim.load_experiment(path))
    assert result.throughput > 0.0


def test_the_calls_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert calls
    for call in calls:
        exec(compile(call, "own_files.md", "exec"), {})


def test_the_page_names_every_generator_and_layer() -> None:
    assert {kind for kind, _ in BLOCKS} == {"cluster", "model", "experiment"}
    missing = [name for name in (*GENERATORS, *LAYER_TYPES) if f"`{name}`" not in PAGE]
    assert not missing
