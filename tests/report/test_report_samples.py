"""The scatter plots of sampled studies: where the dots stand, and which field comes first."""

import pytest
from report_studies import record, study

from ddlsim.errors import ConfigError
from ddlsim.report.html import html_report
from ddlsim.report.study_figures import scatter
from ddlsim.study.store import Member
from ddlsim.study.table import Table
from ddlsim.study.worker import DONE, Outcome


def sample(n=20):
    """Throughput rises with the workers and, in other units, falls with the latency; the strategy does nothing."""
    members, outcomes = [], {}
    for i in range(n):
        latency = f"{(7 * i) % n + 1} us" if i % 2 else f"{((7 * i) % n + 1) / 1000} ms"
        settings = {"cluster.nic.latency": latency, "strategy": "ring" if i % 2 else "servers", "workers": i + 1}
        members.append(Member(str(i), settings, 0))
        outcomes[str(i)] = Outcome(DONE, "", record(i + 1, 0.5, 0), 0.1)
    return Table(list(settings), members, outcomes)


def test_a_panel_for_each_field_the_strongest_first():
    table = sample()
    first = scatter(table)
    panels = first.figure.axes
    assert [axes.get_xlabel() for axes in panels] == ["workers", "NIC latency", "strategy"]
    assert first.get_title() == "rho = +1.00"
    assert panels[2].get_title() == ""  # strategies have no order
    x, y = panels[1].lines[0].get_data()
    assert sorted(x) == pytest.approx([1e-6 * (i + 1) for i in range(20)])
    assert list(y) == pytest.approx(table.summary["throughput"].tolist())


@pytest.mark.slow
def test_only_fields_with_many_values_call_for_it(tmp_path):
    scatter(sample(), tmp_path / "sample.png", metric="efficiency")
    assert (tmp_path / "sample.png").stat().st_size > 5000
    assert "Throughput over each field" in html_report(sample())
    assert "over each field" not in html_report(study())
    with pytest.raises(ConfigError, match="scatter: all configurations with a result are equal"):
        scatter(sample(1))
