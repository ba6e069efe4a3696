"""Make the pictures that the README and the docs show: `python docs/make_pictures.py`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ddlsim
from ddlsim.report.study_figures import breakdown, heat_map, one_change, tornado

OUT = Path(__file__).parent / "pictures"

base = ddlsim.Experiment("cloud-25g-16x8-v100", "resnet50", batch_size=64, steps=4)
one_server = ddlsim.ParameterServer(1, "colocated", local_reduction=True)
study = ddlsim.Study(
    # what connections carry does not follow from the links, so links of other rates are compared as ideal ones
    base=base.with_(cluster="cloud-25g-16x8-v100+transport=ideal", jitter=ddlsim.Lognormal(0.05)),
    vary={
        "workers": [8, 16, 32, 64, 128],
        "strategy": [ddlsim.AllReduce("ring"), one_server],
        "cluster.nic.bandwidth": ["10 Gbit/s", "25 Gbit/s", "100 Gbit/s"],
    },
    seeds=3,
)
table = study.run(jobs=1)
heat_map(table, "workers", "cluster.nic.bandwidth", OUT / "study_heat_map.png")
breakdown(table, OUT / "study_breakdown.png", n=10)
one_change(table, OUT / "study_one_change.png")
best = ddlsim.simulate(base.with_(workers=128))
tornado(best.sensitivities(), OUT / "study_tornado.png", title="128 workers, ring, 25 Gbit/s")

for script in sorted((OUT.parents[1] / "examples").glob("*.py")):  # those that draw, for the gallery of the site
    if ".png" in script.read_text(encoding="utf-8"):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, str(script)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            for picture in Path(folder).rglob("*.png"):
                shutil.copy(picture, OUT / "examples" / f"{script.stem}-{picture.name}")
