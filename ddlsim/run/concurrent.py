"""Runs and background traffic on one network: the run with the earliest event advances, up to the next event of
another run.

Each run has its own loop, so its events keep their own order; runs interact only through the bandwidth of shared
channels. Runs that share no channel give the same results, bit for bit, as when simulated separately.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.cluster import Floats
from ddlsim.errors import ConfigError, DdlsimError, DeadlockError, NoUpdateError, unknown_name
from ddlsim.network import Network
from ddlsim.network.sources import WithSources
from ddlsim.reliability import Background, RandomFaults
from ddlsim.reliability.faults import Fault, effects_of, inject, sampled
from ddlsim.run.conservation import check_network
from ddlsim.run.costs import shares
from ddlsim.run.experiment import Experiment, Job, placed
from ddlsim.run.failure_timeline import has_failure_timeline
from ddlsim.run.prepare import prepare
from ddlsim.run.result import Result
from ddlsim.run.simulate import ActiveRun
from ddlsim.runtime.context import Process
from ddlsim.runtime.loop import Halt, Loop
from ddlsim.units import si

#: called when a run has ended, with the error that ended it, if any
Ended = Callable[[DdlsimError | None], None]
#: turns between two checks for a deadlock
TURNS = 1000


@dataclass(frozen=True, eq=False)
class Client:
    """One of the runs.

    name    for messages
    loop    its loop, with its own view of the network
    latest  s at which it ends in any case
    ended   called when it has ended, by its own rule or at `latest`, or with the error that ended it
    halt    called before its time goes on; returns whether it should stop
    """

    name: str
    loop: Loop
    latest: float
    ended: Ended
    halt: Halt | None = None


class SharedClock:
    """Runs the clients on a `network` in turn. Later clients start at times known in advance."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._clients: dict[int, Client] = {}
        self._faces: dict[int, Network] = {network.client: network}
        self._next: dict[int, float] = {}  # s, when each client does something by itself
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._n_coming = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call an action at a time (s), before all other events of that time."""
        heapq.heappush(self._coming, (time, next(self._n_coming), action))

    def add(self, client: Client) -> None:
        """Add a client that begins now."""
        number = client.loop.network.client
        self._clients[number], self._faces[number] = client, client.loop.network
        self._look(number)

    def run(self, done: Callable[[], bool]) -> None:
        """Run all clients until `done` returns true.

        Raises :class:`~ddlsim.errors.DeadlockError` if a client that has not ended has no further events.
        """
        turns = itertools.count(1)
        while not done():
            if next(turns) % TURNS == 0:
                self._look_for_the_stuck()
            coming = self._coming[0][0] if self._coming else np.inf
            waiting = self.network.waiting_clients
            if waiting and waiting[0] not in self._clients:
                self._faces[waiting[0]].advance()  # discards its completions, because its run has ended
            elif waiting:
                self._go(waiting[0], coming)
            elif not self._clients:
                if coming == np.inf:
                    raise DeadlockError("no event is left, but some runs have not ended")
                self.network.advance(coming)
                if not self.network.others_wait:
                    self._begin()
            else:
                number = min(self._next, key=self._next.__getitem__)
                if coming <= self._next[number] and coming <= self.network.now:
                    self._begin()
                else:
                    self._go(number, coming)

    def _look_for_the_stuck(self) -> None:
        """Raise DeadlockError for a client that waits without anything in flight, while others go on."""
        waiting = self.network.waiting_clients
        for number, client in self._clients.items():
            if self._next[number] == np.inf and not self.network.is_under_way(number) and number not in waiting:
                waits = client.loop.who_waits
                raise DeadlockError(
                    f"{client.name}: deadlock at {self.network.now:.6g} s: no event of this run is left, although "
                    f"other runs continue{'; ' * bool(waits)}{waits}"
                )

    def _begin(self) -> None:
        _, _, action = heapq.heappop(self._coming)
        action()

    def _go(self, number: int, coming: float) -> None:
        """Let a client go on, up to the next event of another client."""
        client = self._clients[number]
        self._next[number] = np.inf  # until it is looked at again
        limit = min(*self._next.values(), coming, client.latest)
        if limit == np.inf and len(self._clients) > 1:  # come back some time, to look after the others
            limit = self.network.now + 600.0
        driver, error = client.loop.driver, None
        try:
            driver.go(limit, client.halt)
        except DdlsimError as raised:
            error = raised
        late = client.loop.now >= client.latest and not self.network.others_wait
        if driver.over or error is not None or late:
            del self._clients[number], self._next[number]
            driver.close()
            client.ended(error)
        else:
            self._look(number)

    def _look(self, number: int) -> None:
        client = self._clients[number]
        self._next[number] = min(client.loop.driver.next(), client.latest)


@dataclass(eq=False)
class Tenant:
    """A job: its name and arrival; its nodes, start and end (s), once known."""

    job: Job
    name: str
    came: float
    places: list[int] = field(default_factory=list)
    start: float = math.nan
    end: float = math.nan
    run: ActiveRun | None = None
    result: Result | None = None


class Together:
    """A network shared by several jobs, and their clock, from 0 s on.

    traffic     background traffic on it
    occupied    indices of devices in use
    queue       whether jobs wait until enough devices are free, first come, first served; otherwise this is an error
    keep_spans  whether activities are recorded for timelines
    faults      faults of links on the cluster's clock, random ones included
    seed        seed of the random faults
    horizon     time in s up to which they, and those of jobs, are sampled; a job that reaches it raises BeyondError

    Raises ConfigError for traffic between missing or unconnected nodes.
    """

    def __init__(
        self, cluster: Cluster, traffic: Sequence[Background], *, occupied: Sequence[int] = (), queue: bool = False,
        keep_spans: bool = False, faults: Sequence[Fault | RandomFaults] = (), seed: int = 0,
        horizon: float = math.inf,
    ) -> None:  # fmt: skip
        self.cluster, self.traffic, self.queue, self.keep_spans = cluster, list(traffic), queue, keep_spans
        self.horizon = horizon
        ends = [(_node(cluster, each.source, each), _node(cluster, each.target, each)) for each in traffic]
        limits = [each.limit(_widest(cluster, *pair)) for each, pair in zip(traffic, ends, strict=True)]
        around = WithSources(cluster, [source for source, _ in ends], limits) if traffic else cluster
        self.network = Network(around, record=keep_spans, n_sources=len(traffic))
        random = sampled(faults, cluster, (), seed, horizon, shared=True)
        inject(effects_of([*faults, *random], cluster, ()), self.network, ())
        self.clock = SharedClock(self.network)
        self.free = set(range(len(cluster.workers))) - set(occupied)
        self.tenants: list[Tenant] = []
        self._n_left = 0  # jobs without `endless` that have not ended
        self.interrupted = False
        self._waiting: list[Tenant] = []
        self._flows: list[Loop] = []
        for number, (each, (_, target)) in enumerate(zip(traffic, ends, strict=True)):
            loop = Loop(self.network.shared())
            loop.env.process(_switch(each, loop, cluster.n_channels + number))
            nbytes = MESSAGE_SECONDS * limits[number]
            loop.env.process(_send(each, loop, cluster.n_nodes + number, target, nbytes))
            self._flows.append(loop)
            self.clock.add(Client(each.label, loop, math.inf, _raise))

    # ------------------------------------------------------------ jobs

    def expect(self, job: Job, name: str) -> None:
        """Schedule the arrival of a job at its start.

        Raises ConfigError if it never fits.
        """
        n_devices, wanted = len(self.cluster.workers), job.n_workers(len(self.cluster.workers))
        if (other := load_cluster(job.experiment.cluster).name) != self.cluster.name:
            raise ConfigError(f"job {name!r}: its cluster is {other!r}, but other jobs run on {self.cluster.name!r}")
        if wanted > n_devices:
            raise ConfigError(f"job {name!r}: needs {wanted} devices, but {self.cluster.name!r} has only {n_devices}")
        tenant = Tenant(job, name, si(job.start, "time"))
        self.tenants.append(tenant)
        self._n_left += not job.endless
        self.clock.at(tenant.came, lambda: self._start_waiting(tenant))

    def _start_waiting(self, *more: Tenant) -> None:
        """Start waiting jobs, after them `more`, in order, as long as their devices are free."""
        self._waiting += more
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.pop(0)

    def _start(self, tenant: Tenant) -> bool:
        """Start a job if its devices are free; return whether they are."""
        job, experiment = tenant.job, tenant.job.experiment
        n = job.n_workers(len(self.cluster.workers))
        wanted = list(job.listed)
        if len(self.free) < n or not self.free.issuperset(wanted):
            if not self.queue:
                raise ConfigError(self._occupied(tenant, n, wanted))
            return False
        tenant.places = wanted
        if not wanted:
            assert isinstance(job.placement, str)
            tenant.places = placed(self.cluster, self.free, n, job.placement, experiment.seed)
        self.free.difference_update(tenant.places)
        tenant.start = self.network.now
        given = experiment.with_(cluster=self.cluster, workers=tenant.places)
        try:
            prepared = prepare(given)
            tenant.run = ActiveRun(
                prepared,
                given,
                self.network.shared(),
                start=tenant.start,
                keep_spans=self.keep_spans,
                endless=job.endless,
                horizon=max(self.horizon - tenant.start, 0.0),
            )
        except DdlsimError as error:
            raise type(error)(f"job {tenant.name!r}: {error}") from None
        if has_failure_timeline(experiment) and tenant.run.recorder.down is None:
            raise ConfigError(
                f"job {tenant.name!r}: failures and checkpoints that stop a run are modelled on uncontended step "
                "times, so they cannot be combined with other jobs; leave them out, or use an asynchronous strategy"
            )
        if tenant.run.monitor is not None:
            tenant.run.monitor.start()
        self.begin(tenant.name, tenant.run, lambda error: self._ended(tenant, error))
        return True

    def _ended(self, tenant: Tenant, error: DdlsimError | None) -> None:
        assert tenant.run is not None
        tenant.run.has_ended(error, f"job {tenant.name!r}: ")
        tenant.end = tenant.run.loop.now
        self._n_left -= not tenant.job.endless
        try:
            tenant.result = tenant.run.result()
        except NoUpdateError as error:
            raise NoUpdateError(f"job {tenant.name!r}: {error}") from None
        self.free.update(tenant.places)
        self._start_waiting()

    def _occupied(self, tenant: Tenant, n: int, wanted: Sequence[int]) -> str:
        running = [each for each in self.tenants if each.run is not None and math.isnan(each.end)]
        for each in running:
            if taken := sorted(set(each.places) & set(wanted)):
                who = f"devices {taken} are occupied by job {each.name!r}"
                break
        else:
            who = f"it needs {n} devices, but only {len(self.free)} of {len(self.cluster.workers)} are free"
        return (
            f"job {tenant.name!r}: at {self.network.now:.6g} s {who}; start it later, place it elsewhere, or set "
            "queue=True to let it wait"
        )

    # ------------------------------------------------------------ running

    def begin(self, name: str, run: ActiveRun, ended: Ended, halt: Halt | None = None) -> None:
        """Add a run that has just been set up; `ended` is called when it has ended."""
        self.clock.add(Client(name, run.loop, run.latest, ended, halt))

    def go_on(self, name: str, run: ActiveRun, halt: Halt | None) -> None:
        """Run a run that has just been set up to its end, or until `halt` stops it, together with all others."""
        ends: list[DdlsimError | None] = []
        self.begin(name, run, ends.append, halt)
        self.clock.run(lambda: bool(ends) or (halt is not None and run.interrupt.wanted))
        if not ends:
            run.loop.driver.close()
        _raise(*ends)
        run.check_horizon()

    def until_all_have_ended(self) -> None:
        """Run until all jobs without `endless` have ended, or until a KeyboardInterrupt; then the others end.

        Raises KeyboardInterrupt if no job has made an update yet.
        """
        try:
            self.clock.run(lambda: self._n_left == 0)
        except KeyboardInterrupt:
            self.interrupted = True
        for tenant in self.tenants:
            if tenant.run is not None and math.isnan(tenant.end):
                self._end(tenant, tenant.run)
        if self.interrupted and all(tenant.result is None for tenant in self.tenants):
            raise KeyboardInterrupt

    def _end(self, tenant: Tenant, run: ActiveRun) -> None:
        """End a job that is still running. A job interrupted before its first update has no result."""
        run.loop.catch_up()
        run.loop.driver.close()
        tenant.end = self.network.now
        run.interrupted = run.halfway = self.interrupted
        run.reason = "interrupted" if self.interrupted else "others have ended"
        if run.recorder.updates:
            tenant.result = run.result()
        elif not self.interrupted:
            raise NoUpdateError(
                f"job {tenant.name!r}: all other jobs ended before its first update; give them more steps"
            )

    # ------------------------------------------------------------ results

    def goodput(self, number: int) -> float:
        """Return the mean bytes/s of a background traffic from its start until now or its end."""
        each, loop = self.traffic[number], self._flows[number]
        nbytes = float(self.network.traffic_of(loop.network.client)[0][self.cluster.n_channels + number])
        seconds = min(self.network.now, si(each.end, "time")) - si(each.start, "time")
        return nbytes / seconds if seconds > 0.0 else 0.0

    def shares(self, *others: ActiveRun) -> list[Floats]:
        """Return the share of each machine and switch that each run pays for: first `others`, then all started jobs."""
        runs = [*others, *(each.run for each in self.tenants if each.run is not None)]
        uses = [(run.loop.start, run.loop.now, run.prepared.nodes, run.loop.traffic().nbytes) for run in runs]
        return shares(self.cluster, uses)

    def check(self) -> None:
        """Raise :class:`~ddlsim.errors.ConservationError` unless the traffic of all jobs on the network adds up."""
        check_network(self.cluster, self.network)


# ---------------------------------------------------------------- background traffic, which sends as fast as it may

#: s that a message takes at the traffic's own rate: so long that the latency between two does not matter
MESSAGE_SECONDS = 60.0


def _switch(background: Background, loop: Loop, channel: int) -> Process:
    """Change the rate of traffic, which its link's `channel` limits, at its times."""
    for (time, share), (until, _) in itertools.pairwise(itertools.chain(background.shares(), [(math.inf, 0.0)])):
        if time > loop.now:
            yield loop.at(time)
        if until > loop.now:
            loop.network.will_change([(loop.now, until, channel, share)])


def _send(background: Background, loop: Loop, source: int, target: int, nbytes: float) -> Process:
    """Send one message after the other, of `nbytes` each."""
    first = next(time for time, share in background.shares() if share > 0.0)
    if first > loop.now:
        yield loop.at(first)
    while True:
        yield loop.send(source, target, nbytes)


# ---------------------------------------------------------------- the jobs and the traffic of an experiment


def with_background(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], *, keep_spans: bool, horizon: float
) -> Together:
    """Return the network and clock of an experiment on some nodes, with its co-located jobs and traffic."""
    traffic = [each for each in experiment.background if isinstance(each, Background)]
    place_of = {node: place for place, node in enumerate(cluster.workers.tolist())}
    occupied = [place_of[node] for node in nodes]
    together = Together(cluster, traffic, occupied=occupied, keep_spans=keep_spans, horizon=horizon)
    jobs = [each for each in experiment.background if isinstance(each, Job)]
    for number, job in enumerate(jobs, 2):
        endless = dataclasses.replace(job, endless=True)
        together.expect(endless, job.name or f"job {number}")
    return together


def _raise(error: DdlsimError | None = None) -> None:
    if error is not None:
        raise error


def _node(cluster: Cluster, name: str, traffic: Background) -> int:
    if name not in cluster.node_names:
        raise unknown_name("node", name, cluster.node_names, f"{traffic.label}: cluster {cluster.name!r}")
    node = cluster.node(name)
    if not cluster.is_endpoint[node]:
        raise ConfigError(f"{traffic.label}: {name} is a switch of {cluster.name!r}; traffic must be between endpoints")
    return node


def _widest(cluster: Cluster, source: int, target: int) -> float:
    """Return the bandwidth of the route between two nodes for one message, in bytes/s."""
    routes = cluster.split_routes(np.array([source]), np.array([target]))
    return float(np.min(cluster.channel_capacity[cluster.link_channel[routes.links]] / routes.share))
