"""What a run writes down, by hand."""

import numpy as np
import pytest

from ddlsim.runtime import loop
from ddlsim.runtime.recorder import COMPUTE, TRANSFER, WAITING, Recorder, Span


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


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("n_channels", [3, 2**16 + 1])
def test_busy_intervals_go_by_channel_and_time(in_turn, n_channels):
    """Whether or not the intervals of each channel come one after the other, with ties in the order given."""
    rng = np.random.default_rng(n_channels)
    starts = rng.integers(0, 50, 400).astype(float)
    starts = np.sort(starts) if in_turn else starts
    channels = rng.integers(0, n_channels, 400)
    channels[-1] = n_channels - 1
    assert loop._order(channels, starts).tolist() == np.lexsort((starts, channels)).tolist()
    assert loop._order(channels[:0], starts[:0]).tolist() == []
