"""What the table of a study says about seeds that make no difference."""

import pytest

from ddlsim import Experiment, Lognormal, NoJitter, Study

REMARK = "all seeds gave the same results, because nothing in these runs is random"


@pytest.mark.parametrize(
    ("jitter", "seeds", "said"),
    [
        pytest.param(NoJitter(), 3, True, id="nothing random"),
        pytest.param(NoJitter(), 1, False, id="one seed"),
        pytest.param(Lognormal(0.1), 3, False, id="jitter"),
    ],
)
def test_seeds_that_make_no_difference_are_remarked(jitter: NoJitter | Lognormal, seeds: int, said: bool) -> None:
    base = Experiment("office-1gbe", "lenet5", jitter=jitter, steps=2)
    text = str(Study(base=base, vary={"workers": [2, 3]}, seeds=seeds).run(jobs=1))
    assert (REMARK in text) == said
