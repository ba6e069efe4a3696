"""What a run writes down, by hand."""

import numpy as np
import pytest

from ddlsim.cluster import Cluster, star
from ddlsim.network import BusyIntervals, Network
from ddlsim.network.busy import busy_rows
from ddlsim.runtime.recorder import COMPUTE, TRANSFER, WAITING, Recorder, Span, Spans


@pytest.mark.parametrize("keep_spans", [True, False])
def test_spans_are_kept_only_if_asked_for_and_seconds_always(keep_spans):
    """Worker 1 computes from 1 s to 3 s and waits from 3 s until the run ends at 4.5 s; a transfer goes on beside it.
    What takes no time is nothing to show."""
    recorder = Recorder(2, keep_spans)
    recorder.worker(1, COMPUTE, "forward", 1.0, 3.0)
    recorder.worker(1, COMPUTE, "nothing", 3.0, 3.0)
    recorder.background("links", "bucket 0", 2.0, 2.5)
    recorder.background("links", "bucket 1", 2.5, 2.5)
    recorder.begin(1, WAITING, "barrier", 3.0)
    recorder.close(4.5)
    assert [of_worker[COMPUTE] for of_worker in recorder.seconds] == [0.0, 2.0]
    assert [of_worker[WAITING] for of_worker in recorder.seconds] == [0.0, 1.5]
    assert not recorder.open
    spans = [
        Span("worker 1", COMPUTE, "forward", 1.0, 3.0),
        Span("links", TRANSFER, "bucket 0", 2.0, 2.5),
        Span("worker 1", WAITING, "barrier", 3.0, 4.5),
    ]
    assert recorder.spans == (spans if keep_spans else [])


def test_spans_in_columns_are_written_out_when_read():
    """By their end, together with those that are booked one by one; what takes no time is nothing to show."""
    recorder = Recorder(2, keep_spans=True)
    recorder.worker(0, COMPUTE, "forward", 0.0, 2.0)
    ranks, starts = np.array([0, 1]), np.array([2.0, 1.0])
    recorder.columns.append(Spans(TRANSFER, "bucket 0", ranks, starts, np.array([4.0, 3.0])))
    recorder.columns.append(Spans(WAITING, "barrier", ranks, starts, np.array([2.0, 1.5])))
    spans = [
        Span("worker 1", WAITING, "barrier", 1.0, 1.5),
        Span("worker 0", COMPUTE, "forward", 0.0, 2.0),
        Span("worker 1 network", TRANSFER, "bucket 0", 1.0, 3.0),
        Span("worker 0 network", TRANSFER, "bucket 0", 2.0, 4.0),
    ]
    assert recorder.spans == spans
    recorder.worker(1, COMPUTE, "forward", 3.0, 5.0)
    assert recorder.spans == [*spans, Span("worker 1", COMPUTE, "forward", 3.0, 5.0)]


@pytest.mark.parametrize("n_channels", [3, 2**16 + 1])
def test_busy_intervals_go_by_channel_and_time(n_channels):
    """Those that nobody has logged, in any order, with ties in the order in which they come."""
    rng = np.random.default_rng(n_channels)
    starts, ends = rng.integers(0, 50, 400).astype(float), np.arange(400.0)
    channels = rng.integers(0, n_channels, 400)
    nothing = Network(Cluster.from_graph(star(2, bandwidth=1.0, latency=0.0)), record=True).busy_intervals()
    busy = BusyIntervals(nothing._parts, n_channels).beside(busy_rows(channels, starts, ends))
    order = np.lexsort((starts, channels))
    assert busy.channel.tolist() == channels[order].tolist()
    assert busy.start.tolist() == starts[order].tolist()
    assert busy.end.tolist() == ends[order].tolist()
    assert not len(nothing.start)
