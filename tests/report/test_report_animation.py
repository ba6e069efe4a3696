"""Collectives played round by round: what the frames show, and the files."""

import re

import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from ddlsim import ConfigError
from ddlsim.collectives import build, messages, states
from ddlsim.collectives.schedule import Schedule
from ddlsim.report.animation import LAST, WHOLE


def axes_at(animation, round):
    animation._func(list(animation.new_frame_seq())[round])
    return animation._fig.axes[0]


def cells(axes, n_ranks):
    """The numbers in the cells, a list per rank."""
    texts = [text for text in axes.texts if type(text).__name__ == "Text"]
    numbers = [text.get_text() for text in texts]
    width = len(numbers) // n_ranks
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def arrows(axes):
    return [text for text in axes.texts if type(text).__name__ == "Annotation"]


def test_a_frame_per_round_has_the_contributions_and_the_messages():
    schedule = build("ring", 4)
    animation = schedule.animate()
    assert len(list(animation.new_frame_seq())) == schedule.n_rounds + LAST
    for round, state in enumerate(states(schedule)):
        axes = axes_at(animation, round)
        assert cells(axes, 4) == state.contributors.astype(str).tolist()
        assert len(arrows(axes)) == len(state.chunk) == (4 if round else 0)
        changed = {(int(box.get_y() + 0.46), int(box.get_x() + 0.46)) for box in axes.patches}
        assert changed == set(zip(state.dst.tolist(), state.chunk.tolist(), strict=True))
    assert axes.get_title().startswith("all-reduce, 4 ranks: round 6 of 6")
    assert abs(axes.images[0].get_array() - to_rgb(WHOLE)).max() < 1e-9


def test_of_a_broadcast_cells_say_whose_data_they_hold():
    animation = build("binomial", 4, kind="broadcast").animate()
    assert cells(axes_at(animation, 0), 4) == [["0"], ["1"], ["2"], ["3"]]
    assert cells(axes_at(animation, 2), 4) == [["0"]] * 4


def test_arrows_of_one_chunk_do_not_lie_on_each_other():
    axes = axes_at(build("recursive_doubling", 8).animate(), 3)
    spans = [(arrow.xyann[0], *sorted((arrow.xyann[1], arrow.xy[1]))) for arrow in arrows(axes)]
    assert len(spans) == 8
    for i, (x, low, high) in enumerate(spans):
        assert all(x != other or high < a or b < low for other, a, b in spans[:i])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gif", pytest.param(".webp", marks=pytest.mark.slow)])
def test_pictures_that_move(tmp_path, suffix):
    path = tmp_path / f"ring{suffix}"
    build("ring", 2).animate(path, seconds=0.5)
    with Image.open(path) as image:
        assert image.n_frames == 3  # the last one stays for longer
    again = tmp_path / f"again{suffix}"
    build("ring", 2).animate(again, seconds=0.5)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_pages_load_nothing_and_their_buttons_have_signs(tmp_path):
    build("ring", 2).animate(tmp_path / "ring.html")
    page = (tmp_path / "ring.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"|https?://[^"\s]*|<link|class="fa', page) == []
    buttons = re.findall(r"<button[^>]*>\s*(.*?)\s*</button>", page, re.DOTALL)
    assert buttons == ["−", "|◀", "◂", "◀", "‖", "▶", "▸", "▶|", "+"]
    assert page.count("data:image/png;base64") == 2 + LAST
    assert "<script" in build("ring", 2).animate()._repr_html_()


def long():
    """Back and forth, 201 rounds."""
    lane = [messages([i % 2], [(i + 1) % 2], reduce=False) for i in range(201)]
    return Schedule(2, 1, (tuple(lane),), kind="broadcast")


@pytest.mark.parametrize(
    ("schedule", "path", "message"),
    [
        (lambda: build("ring", 33), None, "the schedule has 33 ranks, above the limit of 32"),
        (lambda: build("naive_ring", 4), "a.mp4", r"a.mp4: unknown animation format; use one of .gif, .webp"),
        (lambda: Schedule(2, 129, build("ring", 2).lanes), None, "the schedule has 129 chunks, above the limit of 128"),
        (long, None, "more than 200 rounds"),
        (lambda: build("ring", 2), "nowhere/a.gif", "nowhere"),
    ],
)
def test_what_cannot_be_drawn(schedule, path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        schedule().animate(path)
