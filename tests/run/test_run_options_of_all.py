"""Every strategy, on random clusters: faults, input and overlap_slowdown have an effect, or the run says why not."""

import pytest
from bundled_strategies import BUNDLED, N_WORKERS, VARIANTS
from draws import few
from worlds_generator import Draw, generated, stored

from ddlsim import Affine, ConfigError, Experiment, Input, LinkFault, Lognormal, NoJitter, Slowdown, Training
from ddlsim.run import run

EVERY = BUNDLED | VARIANTS
FACTOR = 3.0


def drawn(name, purpose):
    """Return a run of a strategy on a random cluster that suits it, and the draws behind it."""
    case = EVERY[name]
    for seed in range(50):
        draw = Draw(f"{purpose} {name} {seed}")
        options = {"steps": 6, "warmup": 0}
        if case.needs_data:
            options = {"training": Training(case.data, updates=12, evaluate_every=6)}
        options["jitter"] = draw.choice((NoJitter(), Lognormal(0.1)))
        options["compute"] = Affine(draw.choice(("2 ms", "20 ms")), 0.0)
        try:
            cluster = stored(draw, generated(draw))
            one = Experiment(cluster, case.model, case.strategy, case.batch_size, N_WORKERS, seed=seed, **options)
            return one, run(one, keep_spans=True), draw
        except ConfigError:  # a grid has no place for a storage, or too few nodes for workers and servers
            continue
    raise AssertionError(f"no cluster suits {name}")


def computing(result):
    """Return the seconds that workers compute, in all."""
    return sum(seconds["compute"] for seconds in result.recorder.seconds)


@pytest.mark.parametrize("name", few(EVERY, 15))
def test_compute_beside_communication_takes_longer(name):
    one, plain, _ = drawn(name, "overlap_slowdown")
    slower = run(one.with_(overlap_slowdown=FACTOR))
    if any(note.startswith("overlap_slowdown has no effect") for note in slower.notes):
        assert slower.recorder.updates == plain.recorder.updates
        assert computing(slower) == computing(plain)
    else:
        assert computing(slower) > computing(plain)


@pytest.mark.parametrize("name", few(EVERY, 15, start=1))
def test_samples_are_waited_for(name):
    one, plain, _ = drawn(name, "input")
    assert "input" not in plain.shares
    result = run(one.with_(input=Input(storage="storage", samples=2000, sample_bytes="1 MB")))
    waited = [seconds.get("input", 0.0) for seconds in result.recorder.seconds]
    assert max(waited) > 0.0
    assert result.recorder.updates[0][0] > plain.recorder.updates[0][0]


@pytest.mark.parametrize("name", few(EVERY, 15, start=2))
def test_faults_slow_down_what_they_hit(name):
    one, plain, draw = drawn(name, "faults")
    rank = draw.randrange(N_WORKERS)
    slower = run(one.with_(faults=[Slowdown(rank, 0.0, "1000 s", FACTOR)]), keep_spans=True)
    longest = [
        max(s.end - s.start for s in result.recorder.spans if (s.track, s.kind) == (f"worker {rank}", "compute"))
        for result in (plain, slower)
    ]
    assert longest[1] > 1.5 * longest[0]
    link = plain.links.sort_values("nbytes").iloc[-1]
    fault = LinkFault(link["source"], link["target"], 0.0, "1000 s", factor=1e-4)  # so that it is the bottleneck
    weaker = run(one.with_(faults=[fault]))
    busy, without = ((result.links["busy"] * result.end_time).sum() for result in (weaker, plain))
    assert busy / weaker.links["nbytes"].sum() > 2.0 * without / plain.links["nbytes"].sum()
