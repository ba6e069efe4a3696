"""What must hold in every world, besides what :mod:`ddlsim.run.conservation` checks in every run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections import defaultdict
from unittest import mock

import numpy as np
from worlds_generator import Draw, JobsWorld, World, read_from_storage, stored

from ddlsim import (
    ConfigError,
    DdlsimError,
    Input,
    LinkFault,
    OverlapSlowdown,
    Pause,
    RandomFaults,
    Result,
    Slowdown,
    Stop,
    simulate_jobs,
)
from ddlsim.cluster import Cluster
from ddlsim.errors import NoUpdateError
from ddlsim.jobs import Jobs
from ddlsim.learning import Learner
from ddlsim.learning.monitor import Row
from ddlsim.network.state import Ints
from ddlsim.report.trace import _Part
from ddlsim.run import run
from ddlsim.run.costs import _computed
from ddlsim.runtime.context import factors
from ddlsim.runtime.servers import server_nodes
from ddlsim.strategies import (
    AllReduce,
    ParameterServer,
    ShardedUpdate,
    contract,
)

__all__ = ["check_faults_without_effect", "check_jobs", "check_pauses", "check_world"]

NBYTES = Row._fields.index("nbytes")


def check_world(world: World) -> Result | None:
    """Make the run twice, perhaps a third time with an earlier end; return its result, None if ddlsim refuses it.

    Raises AssertionError, or whatever the run raises, if anything does not hold.
    """
    drawn = 0
    original = Learner.gradient

    def gradient(learner, rank, params, n_samples, now):
        nonlocal drawn
        drawn += n_samples
        return original(learner, rank, params, n_samples, now)

    try:
        with mock.patch.object(Learner, "gradient", gradient):
            result = run(world.experiment)
    except ConfigError:
        return None
    except NoUpdateError:
        return None  # of a run with a max_time, or something stands still until the end
    learned = sum(n for _, n in result.recorder.updates)
    if world.experiment.training is not None:  # where nothing learns, nothing is drawn
        assert learned <= drawn, f"updates learned from {learned} samples, but {drawn} were drawn"
    _check_tables(result)
    if result.has_failure_timeline:
        try:
            (_check_life if result.recorder.down is None else _check_free_life)(result)
        except ConfigError:
            return None
    _check_repeated(result, run(world.experiment, keep_spans=True))
    _check_plan(result)
    if world.cut is not None:
        _check_cut(world, result)
    return result


def check_jobs(world: JobsWorld) -> Jobs:
    """Simulate jobs twice; return what they did.

    Raises AssertionError, or whatever the simulation raises, if anything does not hold.
    """
    first, again = (simulate_jobs(world.jobs, queue=True, faults=world.faults) for _ in range(2))
    for one, other in zip(first.runs, again.runs, strict=True):
        assert one.result.recorder.updates == other.result.recorder.updates
        assert one.result.recorder.seconds == other.result.recorder.seconds
        assert one.result.n_messages == other.result.n_messages
        _check_tables(one.result)
        if one.result.has_failure_timeline:
            (_check_life if one.result.recorder.down is None else _check_free_life)(one.result)
    assert first.goodputs == again.goodputs
    links = first.links
    bursts = first.cluster.details is not None and first.cluster.details.burst.max() > 0.0
    assert bursts or (links["utilisation"] <= links["busy"] + 1e-9).all()
    assert ((links["busy"] >= 0.0) & (links["busy"] <= 1.0 + 1e-9)).all()
    columns = links[[*first.names, "background"]].sum(axis=1)
    np.testing.assert_allclose(columns, first.channel_nbytes[np.unique(first.cluster.link_channel)], rtol=1e-9, atol=1)
    _check_bills(first)
    return first


def check_pauses(world: World) -> Result | None:
    """Make the run with pauses in it; return its result, None if ddlsim refuses it.

    Raises AssertionError, or whatever the run raises, if anything does not hold.
    """
    one, draw = world.experiment, random.Random(world.seed)
    try:
        plain = run(one)
        lasts = plain.undisturbed.end_time if plain.has_failure_timeline else plain.simulated_time
        pauses = [
            Pause(draw.uniform(0.0, 0.9) * lasts, draw.choice((0.01, 0.3, 2.0)) * lasts)
            for _ in range(draw.choice((1, 1, 2, 3)))
        ]
        if draw.random() < 0.1:
            pauses.append(Pause(0.0, 0.5 * lasts))
        result, again = (run(one.with_(faults=[*one.faults, *pauses]), keep_spans=keep) for keep in (True, False))
    except (ConfigError, NoUpdateError):
        return None
    assert (result.recorder.updates, result.recorder.seconds) == (again.recorder.updates, again.recorder.seconds)
    endless = any(isinstance(fault, Stop | RandomFaults) for fault in one.faults)  # then computing is cut, not begun
    for start, end in [(pause.start, pause.start + pause.duration) for pause in pauses]:
        for span in result.recorder.spans:
            if span.kind == "transfer" or (span.kind == "compute" and not endless):
                assert not start < span.start < end, f"{span} starts in the pause of {start} s to {end} s"
            elif span.kind == "communication":
                assert min(end, span.end) - max(start, span.start) < 1e-12, f"{span} in the pause of {start} to {end} s"
    return result


def check_faults_without_effect(world: World) -> int:
    """Make the run without faults, and again with one that changes nothing; return how many kinds were compared.

    Half of the strategies with collectives have those of known time, and half of the worlds without input read samples
    from a storage. Raises AssertionError, or whatever the run raises, if anything differs in the last bit.
    """
    draw = Draw(f"faults without effect {world.seed}")
    one = world.experiment.with_(faults=(), failures=None, elastic=None, checkpoints=None)
    if hasattr(one.strategy, "cost") and draw.random() < 0.5:
        with contextlib.suppress(ConfigError):
            one = one.with_(strategy=dataclasses.replace(one.strategy, cost="nccl"))
    if one.input is None and not one.cluster.grid and draw.random() < 0.5:
        one = read_from_storage(draw, one, stored(draw, one.cluster))
    try:
        plain = run(one)
    except (ConfigError, NoUpdateError):
        return 0
    cluster, lasts = plain.cluster, plain.simulated_time
    names, link = cluster.node_names, draw.randrange(len(cluster.link_src))
    unused = [
        each for each in range(len(cluster.link_src))
        if not plain.channel_nbytes[cluster.link_channel[_both_ways(cluster, each)]].any()
    ]  # fmt: skip

    def fault(link: int, start: float, factor: float) -> LinkFault:
        ends = names[cluster.link_src[link]], names[cluster.link_dst[link]]
        return LinkFault(*ends, start * lasts, 0.3 * lasts, factor)

    without_effect = {
        "a factor of 1": fault(link, 0.2, 1.0),
        "a link after the end": fault(link, 1.5, 0.5),
        "a stop after the end": Stop(0, 1.5 * lasts, lasts),
        "a pause after the end": Pause(1.5 * lasts, lasts),
    }
    if unused:
        without_effect["a link that nothing uses"] = fault(draw.choice(unused), 0.2, 0.5)
    for name, each in without_effect.items():
        assert _bits(run(one.with_(faults=[each]))) == _bits(plain), f"{name}: {each} changes the run"
    slowed = one.with_(slowdowns=[*one.slowdowns, Slowdown(0, 0.2 * lasts, 0.3 * lasts, 1.0)])
    assert _bits(run(slowed)) == _bits(plain), "a slow-down by a factor of 1 changes the run"
    return len(without_effect) + 1


def _both_ways(cluster: Cluster, link: int) -> Ints:
    """Return the links between the ends of a link, in both directions."""
    ends = [cluster.link_src[link], cluster.link_dst[link]]
    return np.flatnonzero(np.isin(cluster.link_src, ends) & np.isin(cluster.link_dst, ends))


def _bits(result: Result) -> tuple[object, ...]:
    """Return what a run has done, to the last bit."""
    recorder = result.recorder
    traffic = result.channel_nbytes.tobytes(), result.channel_busy.tobytes(), result.nbytes_sent, result.n_messages
    return (*traffic, result.simulated_time, recorder.updates, recorder.step_end, recorder.seconds, recorder.idle)


def _check_bills(jobs: Jobs) -> None:
    """Machines and switches are paid for once while anybody uses them, and whoever uses more pays no less."""
    cluster = jobs.cluster
    paid = np.zeros(cluster.n_nodes)
    for ran in jobs.runs:
        assert ran.result.share is not None
        assert ((ran.result.share >= 0.0) & (ran.result.share <= 1.0 + 1e-9)).all()
        paid += ran.result.share * (ran.end - ran.start)
        assert (ran.result.share[cluster.workers[list(ran.places)]] > 0.0).all()
    for place, node in enumerate(cluster.workers.tolist()):
        users = [ran for ran in jobs.runs if place in ran.places]
        occupied = sum(ran.end - ran.start for ran in users)
        assert paid[node] >= occupied * (1.0 - 1e-9)
    assert (paid <= jobs.end_time * (1.0 + 1e-9)).all()


def _check_free_life(result: Result) -> None:
    """The time of a run whose workers crash adds up."""
    timeline = result.failure_timeline
    assert math.isclose(timeline.useful + timeline.lost + timeline.down, timeline.end, rel_tol=1e-9)
    assert min(timeline.lost, timeline.detecting, timeline.repairing, timeline.restarting) >= -1e-9
    assert result.availability <= 1.0 + 1e-9


def _check_plan(result):
    """The step as a table is proved, takes as long as the run, and its bounds are not above that."""
    experiment, strategy = result.experiment, result.experiment.strategy
    slower = experiment.slowdowns or experiment.faults or experiment.overlap_slowdown != OverlapSlowdown()
    if experiment.compression or slower or experiment.training or isinstance(experiment.input, Input):
        return
    nodes = result.nodes.tolist()
    if isinstance(strategy, AllReduce | ShardedUpdate) and strategy.cost == "simulated":
        algorithm, order = getattr(strategy, "algorithm", None), strategy.rank_order
        if isinstance(strategy, ShardedUpdate):
            algorithm = {"reduce_scatter": strategy.reduce_scatter, "all_gather": strategy.all_gather}
    elif isinstance(strategy, ParameterServer) and strategy.work is None and strategy.fabric is None:
        nodes += server_nodes(result.cluster, nodes, strategy.servers, strategy.placement)
        inside = {False: "direct", True: "tree"}.get(strategy.local_reduction, strategy.local_reduction)
        algorithm, order = {"push_pull": inside}, "given"
    else:
        return
    if algorithm == "auto":
        return
    # one step more: a worker that is early goes on, and its messages meet those of workers that are late
    steps, micro_steps = len(result.recorder.updates) + 1, experiment.accumulation
    plan = contract.of(strategy).plan(result.workloads, steps, micro_steps)
    plan.check()
    drawn = [
        list(itertools.islice(factors(experiment.jitter, experiment.seed, rank), steps * micro_steps))
        for rank in range(result.n_workers)
    ]
    micro_step = np.where(plan.batch >= 0, plan.batch % micro_steps, micro_steps - 1)
    drawn += [[1.0] * steps * micro_steps] * len(plan.servers)
    factor = np.array(drawn).reshape(-1, steps, micro_steps)[plan.rank, plan.step, micro_step]
    plan = dataclasses.replace(plan, seconds=plan.seconds * factor)
    executed = plan.execute(result.cluster, algorithm, nodes=nodes, rank_order=order)
    times = np.array([time for time, _ in result.recorder.updates])
    np.testing.assert_allclose(np.nanmax(executed.step_ends, axis=0)[:-1], times, rtol=1e-12)
    bounds = plan.critical_path(), plan.cut(result.cluster, nodes).seconds
    assert max(bounds) <= executed.seconds * (1.0 + 1e-12), f"bounds {bounds} s, but it takes {executed.seconds} s"


def _check_tables(result):
    assert math.isfinite(result.throughput)
    assert result.throughput > 0.0
    links = result.links
    if result.cluster.details is None or result.cluster.details.burst.max() == 0.0:
        assert (links["utilisation"] <= links["busy"] + 1e-9).all()
    assert ((links["busy"] >= 0.0) & (links["busy"] <= 1.0 + 1e-9)).all()
    assert math.isclose(sum(result.shares.values()), 1.0, rel_tol=1e-9)
    assert min(result.recorder.staleness, default=0) >= 0
    if result.n_workers > 1 and links["nbytes"].sum() > 0.0:
        assert result.nbytes_sent > 0.0
    history = result.evaluations if result.monitor is not None else []
    for before, after in itertools.pairwise(history):
        assert before.nbytes <= after.nbytes
        assert before.time <= after.time
    if history:
        assert history[-1].nbytes <= result.nbytes_sent * (1.0 + 1e-12)


def _check_life(result):
    """Its seconds add up, no device computes for longer than it is there, and what counts has been done."""
    timeline = result.failure_timeline
    parts = (
        timeline.useful,
        timeline.lost,
        timeline.checkpointing,
        timeline.detecting,
        timeline.repairing,
        timeline.restarting,
    )
    slack = 1e-9 * timeline.end
    assert math.isclose(sum(parts), timeline.end, rel_tol=1e-9)
    assert min(parts) >= -slack, parts
    assert timeline.steps >= 0
    assert math.isfinite(result.goodput)
    assert 0.0 <= result.availability <= 1.0 + 1e-9
    computed = _computed(result)
    there = timeline.end if timeline.out_of_service is None else timeline.end - timeline.out_of_service
    assert (computed >= -slack).all()
    assert (computed <= there + slack).all(), (computed, there)
    assert computed.max() <= timeline.useful + timeline.lost + slack
    if timeline.out_of_service is not None:
        times = [time for time, _ in timeline.groups]
        assert times == sorted(times)
        least = result.experiment.elastic.min_workers
        assert all(n == 0 or least <= n <= result.n_workers for _, n in timeline.groups)
        most = result.experiment.batch_size * result.experiment.accumulation
        if training := result.experiment.training:
            growing, phases = training.growing_batch, training.phases
            most *= 1 if growing is None else growing.factor ** len(growing.milestones)
            most *= max([1.0, *(phase.batch / result.experiment.batch_size for phase in phases if phase.batch)])
        most *= 1 if contract.of(result.experiment.strategy).shares_batch else result.n_workers
        assert result.goodput * timeline.end <= most * max(timeline.steps, 1) * (1.0 + 1e-9)
    pace = timeline.timeline.pace
    times = np.linspace(0.0, min(timeline.end, 1e6), 50)
    assert (np.diff(pace.until(times)) >= 0.0).all()
    assert (pace.until(pace.when(pace.until(times))) <= pace.until(times) + slack).all()
    if timeline.finished and result.monitor is not None:
        assert result.evaluations[-1].samples >= 0


def _check_repeated(result, again):
    """The same run, recorded for a timeline: the same to the last bit, and the timeline shows it."""
    for name in ("updates", "step_end", "seconds", "idle", "staleness"):
        assert getattr(again.recorder, name) == getattr(result.recorder, name), name
    assert again.end_time == result.end_time
    assert again.n_messages == result.n_messages
    np.testing.assert_allclose(again.channel_nbytes, result.channel_nbytes, rtol=1e-12)
    if result.monitor is not None:
        assert result.params.tobytes() == again.params.tobytes()
        rows, others = (np.array(one.evaluations, dtype=float) for one in (result, again))
        np.testing.assert_allclose(rows[:, NBYTES], others[:, NBYTES], rtol=1e-12)  # added up in another order
        np.testing.assert_array_equal(np.delete(rows, NBYTES, 1), np.delete(others, NBYTES, 1))
    tracks = defaultdict(list)
    for span in again.recorder.spans:
        tracks[span.track].append(span)
        assert 0.0 <= span.start < span.end <= again.end_time * (1.0 + 1e-12), span
    for rank, seconds in enumerate(again.recorder.seconds):
        own = sorted(tracks[f"worker {rank}"], key=lambda s: s.start)
        for left, right in itertools.pairwise(own):
            assert left.end <= right.start * (1.0 + 1e-12), (left, right)
        for kind, booked in seconds.items():
            shown = sum(span.end - span.start for span in own if span.kind == kind)
            assert math.isclose(shown, booked, rel_tol=1e-9, abs_tol=1e-12), (rank, kind)
    ends = defaultdict(float)
    for event in _Part(again, whole=True).events():
        if event["ph"] == "X":
            place = event["pid"], event["tid"]
            assert event["ts"] >= ends[place] * (1.0 - 1e-12) - 1e-6, event
            ends[place] = event["ts"] + event["dur"]
    assert max(ends.values()) <= again.end_time * 1e6 * (1.0 + 1e-9)


def _check_cut(world, result):
    """A run that ends earlier has made the same updates until then."""
    time = world.cut * result.end_time
    if not time > 0.0:
        return
    try:
        part = run(world.experiment.with_(max_time=time))
    except DdlsimError as error:
        if "before its first update" in str(error) and time < result.recorder.updates[0][0] * (1.0 + 1e-12):
            return
        raise
    assert part.end_time <= time
    wanted = [update for update in result.recorder.updates if update[0] <= part.end_time]
    assert part.recorder.updates == wanted
    for whole, cut in zip(result.recorder.step_end, part.recorder.step_end, strict=True):
        assert whole[: len(cut)] == cut
    assert part.nbytes_sent <= result.nbytes_sent * (1.0 + 1e-12)
    assert (part.channel_nbytes <= result.channel_nbytes * (1.0 + 1e-9) + 1e-6).all()
