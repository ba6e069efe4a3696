"""Questions to :func:`~ddlsim.recommend` from TOML files, whose keys are its arguments.

.. code-block:: toml

    clusters = ["dgx1-v100-16"]          # bundled, or paths beside this file
    model = "bert-base"
    workers = [16]
    batch_sizes = [64]
    strategies = [{ type = "splits", stage = [1, 3] }, { type = "all-reduce" }]

    [target]                             # the fields of Target
    throughput = "500 samples/s"

    [base]                               # everything else, as in an experiment file
    precision = "fp16"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddlsim.arguments import checked
from ddlsim.plain import read_toml
from ddlsim.planner.decide import recommend
from ddlsim.run.files import SCHEMA
from ddlsim.schema import Source


@checked
def load_question(source: str | Path, *, allow_code: bool = False) -> dict[str, Any]:
    """Return what the TOML file `source` asks: the arguments of :func:`~ddlsim.recommend` that it names, by name.

    As in experiment files, "package.module:Name" is refused unless `allow_code`. Raises
    :class:`~ddlsim.errors.ConfigError` in one line: file, field, value, rule and remedy.
    """
    path = Path(source)
    table = read_toml(path)
    clusters, base, compressions = table.get("clusters"), table.get("base"), table.get("compressions")
    if isinstance(base, dict):
        first = clusters[0] if isinstance(clusters, list) and clusters else clusters or ""
        table["base"] = {"cluster": first, "model": table.get("model", "resnet50"), **base}
    if isinstance(compressions, list):
        table["compressions"] = [None if each == "none" else each for each in compressions]
    return SCHEMA.arguments(recommend, table, str(path), Source(path.parent, allow_code), ": ")
