"""Studies as text: the file and the program say the same study."""

import pytest

import ddlsim
from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.study import Range, load_study

BASE = ddlsim.Experiment(
    "office-1gbe", "lenet5", ddlsim.LocalSGD(4), batch_size=8, workers=2, steps=3, jitter=ddlsim.Lognormal(0.1),
    compute=ddlsim.Measured("10 ms", 8),
)  # fmt: skip
STUDIES = {
    "plain": ddlsim.Study(BASE, {"workers": [1, 2]}),
    "parts": ddlsim.Study(
        BASE, {"strategy": [ddlsim.AllReduce("ring"), ddlsim.LocalSGD(2)], "compression": [None, ddlsim.TopK(0.1)]},
        seeds=2,
    ),
    "named": ddlsim.Study(
        BASE, {"strategy": {"slow, but sure": ddlsim.AllReduce("ring", "none"), "fast": ddlsim.AllReduce("auto")}},
        seeds=[3, 5], stability=True,
    ),
    "together": ddlsim.Study(BASE, {"model, batch_size": [("lenet5", 8), ("ffn", 4)]}, design="list"),
    "sampled": ddlsim.Study(
        BASE, {"cluster.nic.bandwidth": Range("1 Gbit/s", "10 Gbit/s", log=True), "steps": Range(1, 8, integer=True)},
        design="latin-hypercube", n_points=3, design_seed=7,
    ),
    "learning": ddlsim.Study(
        BASE.with_(model="shapes-cnn", compute=None, training=ddlsim.Training("shapes", rate=0.1, epochs=1.0)),
        {"training.rate": [0.1, 0.2]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_the_file_and_the_program_say_the_same_study(name, tmp_path):
    study = STUDIES[name]
    path = tmp_path / "study.toml"
    path.write_text(study.to_toml())
    read = load_study(path)
    assert [point.key for point in read.points] == [point.key for point in study.points]
    assert [dict(point.settings) for point in read.points] == [dict(point.settings) for point in study.points]
    made = {}
    exec(study.to_python(), made)
    again = study.with_(base=made["base"], vary=made["vary"])
    assert [point.key for point in again.points] == [point.key for point in study.points]


@pytest.mark.slow
def test_the_program_prints_the_table(capsys):
    study = STUDIES["plain"]
    exec(study.to_python(), {"__name__": "__main__"})
    assert capsys.readouterr().out == f"{study.run(jobs=1)}\n"


def test_files_cannot_say_objects():
    cluster = ddlsim.load_cluster(star(2, bandwidth="1 Gbit/s", latency="5 us"))
    study = ddlsim.Study(BASE.with_(cluster=cluster), {"workers": [1, 2]})
    for write in (study.to_toml, study.to_python):
        with pytest.raises(ConfigError, match="cluster: is an object"):
            write()
