"""Independent oracles of the network engine: progressive filling in NumPy, and what max-min rates obey."""

from dataclasses import dataclass, field

import numpy as np

from ddlsim.cluster import LinkDetails, Routes


@dataclass
class Paths:
    """A fabric of nothing but explicit routes: flow i goes from node 2 i to node 2 i + 1 over ``paths[i]``.

    Every link is a channel of its own unless `link_channel` says otherwise (`capacity` is per channel). With `shares`,
    as `paths`, only that share of a flow's bytes crosses the link.
    """

    capacity: list[float]
    latency: list[float]
    paths: list[list[int]]
    link_channel: np.ndarray | None = None
    overhead: float = 0.0
    details: LinkDetails | None = None
    reverse_link: np.ndarray | None = None
    link_seed: int | None = None
    link_latency: np.ndarray = field(init=False)
    shares: list[list[float]] | None = None

    def __post_init__(self):
        n_nodes = 2 * len(self.paths)
        self.channel_capacity = np.array(self.capacity, dtype=float)
        self.link_latency = np.array(self.latency, dtype=float)
        if self.link_channel is None:
            self.link_channel = np.arange(len(self.latency))
        self.send_overhead = np.full(n_nodes, self.overhead)
        self.recv_overhead = np.full(n_nodes, self.overhead)
        self.reduce_time = np.zeros(n_nodes)

    @property
    def splits(self):
        return self.shares is not None

    def split_routes(self, src, dst, flows):
        assert (np.asarray(dst) == np.asarray(src) + 1).all()
        paths = [self.paths[s // 2] for s in src.tolist()]
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in paths])]).astype(np.int64)
        links = np.array([link for p in paths for link in p], dtype=np.int64)
        if self.shares is None:
            return Routes(offsets, links)
        return Routes(offsets, links, np.array([share for s in src.tolist() for share in self.shares[s // 2]]))

    def delay(self, flow):
        return float(sum(self.link_latency[link] * share for link, share in self.crossings(flow)))

    def crossings(self, flow):
        """The links of a flow, with its share on each."""
        path = self.paths[flow]
        return list(zip(path, [1.0] * len(path) if self.shares is None else self.shares[flow], strict=True))


def fair_rates(capacity, hops, shares=None):
    """Max-min fair rates by progressive filling; `hops` lists the channels of each flow, `shares` its share on each."""
    rates = np.zeros(len(hops))
    crosses = np.zeros((len(capacity), len(hops)))
    for flow, channels in enumerate(hops):
        for i, channel in enumerate(channels):
            crosses[channel, flow] += 1 if shares is None else shares[flow][i]
    left = np.array(capacity, dtype=float)
    free = np.array([len(h) > 0 for h in hops], dtype=bool)
    rates[~free] = np.inf
    while free.any():
        load = np.where((crosses[:, free] > 0).any(axis=1), crosses[:, free].sum(axis=1), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(load > 0, left / load, np.inf)
        tightest = int(share.argmin())
        now = free & (crosses[tightest] > 0)
        rates[now] = share[tightest]
        left -= crosses[:, now].sum(axis=1) * share[tightest]
        free &= ~now
    return rates


def finish_times(fabric, starts, nbytes):
    """When each flow of a :class:`Paths` ends: it waits its latency, then shares its channels."""
    n = len(starts)
    hops = [[int(fabric.link_channel[link]) for link in path] for path in fabric.paths]
    begin = np.array([starts[i] + fabric.delay(i) for i in range(n)])
    left = np.array(nbytes, dtype=float)
    end = np.full(n, np.inf)
    for i in range(n):
        if left[i] == 0 or not hops[i]:
            end[i] = begin[i]
    now = begin.min()
    while np.isinf(end).any():
        active = np.flatnonzero(np.isinf(end) & (begin <= now))
        shares = None if fabric.shares is None else [fabric.shares[i] for i in active]
        rates = fair_rates(fabric.channel_capacity, [hops[i] for i in active], shares)
        waiting = begin[np.isinf(end) & (begin > now)]
        ends = now + left[active] / rates
        then = min([*waiting, *ends])
        left[active] -= rates * (then - now)
        end[active[ends <= then * (1 + 1e-14)]] = then
        now = then
    return end


def assert_max_min(network, capacity):
    """No channel is over capacity, and every flow crosses a full channel on which none is faster."""
    hops, rates = network.rates()
    net = network.engine.net
    every = len(net.flow_hops) // max(len(net.slots), 1)
    shares = [
        net.flow_share[i * every : i * every + len(channels)] if net.counts.split else np.ones(len(channels))
        for i, channels in enumerate(hops)
    ]
    load = np.zeros(len(capacity))
    fastest = np.zeros(len(capacity))
    for channels, rate, share in zip(hops, rates, shares, strict=True):
        for channel, part in zip(channels, share, strict=True):
            load[channel] += rate * part
            fastest[channel] = max(fastest[channel], rate)
    assert (load <= capacity * (1 + 1e-11)).all(), "a channel carries more than its capacity"
    full = load >= capacity * (1 - 1e-11)
    for channels, rate in zip(hops, rates, strict=True):
        assert any(full[c] and rate >= fastest[c] * (1 - 1e-11) for c in channels), (channels, rate)
    return len(rates)


def run_flows(network, fabric, starts, nbytes, *, check=True):
    """Send flow i of a :class:`Paths` at ``starts[i]``; return (end of each, flows checked in all)."""
    begins = {starts[i] + fabric.delay(i) for i in range(len(starts))}
    stops = sorted({*starts, *begins}) if check else sorted(set(starts))
    end = np.full(len(starts), np.nan)
    flow_of = {}
    n_checked = 0

    def until(time):
        nonlocal n_checked
        while (done := network.advance(time)) is not None:
            for handle in done.ids.tolist():
                end[flow_of[handle]] = done.time
            if check:
                n_checked += assert_max_min(network, fabric.channel_capacity)

    for stop in stops:
        until(stop)
        now = [i for i in range(len(starts)) if starts[i] == stop]
        if now:
            src = 2 * np.array(now)
            handles = network.send(src, src + 1, np.array([nbytes[i] for i in now], dtype=float), stop)
            flow_of.update(zip(handles.tolist(), now, strict=True))
            until(stop)
        if check:
            n_checked += assert_max_min(network, fabric.channel_capacity)
    until(np.inf)
    assert not network.pending
    return end, n_checked
