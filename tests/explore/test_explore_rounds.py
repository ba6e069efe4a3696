"""Collectives played round by round: times, closed forms, words, pictures, and the program that gives the same."""

import contextlib
import io
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.colors import to_rgba

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.explore.jobs import Progress
from ddlsim.explore.rounds import Question, in_words, play, takes_segments
from ddlsim.explore.screens.collective import bars, closed_form, files, numbers, pictures
from ddlsim.report.animation import CHANGED, Frames, messages_of, ranges, ring_of_ranks, round_times

STAR = "star-1024-10g"
QUIET = Progress(lambda call: call(), lambda share, text: None)
QUESTIONS = [
    Question(STAR),
    Question(STAR, "all_reduce", "double_binary_tree", 5, "1 MB", 3),
    Question(STAR, "broadcast", "chain", 4, "8 MB", 2),
    Question("cloud-25g-16x8-v100", "all_reduce", "hierarchical(ring, ring)", 4, "4 MB"),
    Question("cloud-25g-16x8-v100", "all_gather", "nccl", 8, "4 MB"),
    Question(STAR, "all_to_all", "bruck", 6, "1 MB"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.kind} {q.algorithm}")
def test_the_program_gives_what_the_screen_shows(question):
    played = play(question, QUIET)
    assert played.states[-1].done.all()
    assert len(played.times) == len(played.states)
    assert all(before <= after for before, after in zip(played.times, played.times[1:], strict=False))
    (file,) = files(question)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(file.text, file.name, "exec"), {})
    first, *rest = printed.getvalue().splitlines()
    assert first == f"{1e3 * played.times[-1]:.6g} ms"
    assert rest == [
        f"after round {state.round}: {state.done.sum()} of {question.n_ranks} ranks whole" for state in played.states
    ]


def test_a_ring_on_a_star_takes_what_its_closed_form_says():
    played = play(Question(STAR, n_ranks=4, nbytes="100 MB"), QUIET)
    form = played.closed_form
    assert played.times[-1] == ddlsim.collective_time(STAR, "ring", "100 MB", ranks=4) == pytest.approx(form.time)
    assert form.uniform
    assert form.formula == "2 (p-1) alpha + 2 (p-1)/p S beta + (p-1)/p S gamma"
    assert played.bus_bandwidth == pytest.approx(1.5 * 100e6 / played.times[-1])
    # every round moves a quarter of the buffer
    assert played.times[1] == pytest.approx(form.alpha + 25e6 * form.beta)
    assert ("closed form", "120.1 ms") in numbers(played)
    assert "the same for every two ranks" in closed_form(played)


def test_the_closed_form_says_where_pairs_differ_and_is_left_out_where_there_is_none():
    machines = play(Question("cloud-25g-16x8-v100", n_ranks=9), QUIET)
    assert not machines.closed_form.uniform
    assert "pairs differ" in closed_form(machines)
    for algorithm, n_ranks in (("recursive_doubling", 6), ("torus_2d", 6), ("parameter_server(2)", 4)):
        played = play(Question(STAR, algorithm=algorithm, n_ranks=n_ranks), QUIET)
        assert played.closed_form is None
        assert closed_form(played) == ""


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (Question(STAR, n_ranks=65), "ranks = 65: must be at most 64"),
        (Question("office-1gbe", n_ranks=60), "ranks = 60: must be 1 to "),
        (Question(STAR, n_ranks=0), "ranks = 0: must be 1 to 1024"),
        (Question("no-such"), "no-such"),
        (Question(STAR, algorithm="rong"), "did you mean 'ring'"),
        (Question(STAR, nbytes="many"), "many"),
        (Question(STAR, "broadcast", "chain", 4, "1 GB", None), "chain cuts 1 GB in 1024 chunks, more than the 256"),
    ],
)
def test_what_cannot_be_played_is_said_in_a_line(question, text):
    with pytest.raises(ConfigError, match=text) as error:
        play(question, QUIET)
    assert "\n" not in str(error.value)


def test_one_rank_has_nothing_to_do():
    played = play(Question(STAR, n_ranks=1), QUIET)
    assert (played.n_rounds, played.times, played.closed_form) == (0, [0.0], None)
    assert in_words(played, 0) == "Before the first round: every rank is complete."
    assert bars(played, 0) == ""


def test_segments_are_of_pipelined_algorithms():
    assert takes_segments("double_binary_tree", "all_reduce")
    assert not takes_segments("ring", "all_reduce")
    assert not takes_segments("double_binary_tree(4)", "all_reduce")


def test_words_of_rounds():
    played = play(Question(STAR, n_ranks=4), QUIET)
    assert in_words(played, 0) == "Before the first round: 0 of 4 ranks are complete."
    assert in_words(played, 1) == (
        "Round 1 of 6: 4 messages of a chunk, added; 20.02 ms, ends after 20.02 ms; 0 of 4 ranks are complete."
    )
    assert in_words(played, 6).endswith("overwritten; 20.02 ms, ends after 120.1 ms; every rank is complete.")
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.kind} {q.algorithm}")
def test_pictures_show_every_rank_and_message(question):
    played = play(question, QUIET)
    frames, n_ranks = Frames(played.schedule, played.states), played.schedule.n_ranks
    for number in {0, 1, played.n_rounds}:
        state = played.states[number]
        ring, sent = ring_of_ranks(state), messages_of(state)
        assert len(ring.collections[0].get_offsets()) == n_ranks
        texts = [text.get_text() for text in ring.texts]
        assert len(texts) == n_ranks + (1 + (len(sent) <= 20)) * len(sent)
        assert len(texts) - sum(map(bool, texts)) == len(sent)  # the arrows
        net, cells = (ElementTree.fromstring(text) for text in pictures(frames, number))
        assert all(f"{src} to {dst}: {ranges(chunks)}" in net.get("aria-label") for src, dst, _, chunks in sent)
        assert f"{state.whole.sum()} of {state.required.sum()}" in cells.get("aria-label")
        colours = [bar.get_facecolor() == to_rgba(CHANGED) for bar in round_times(played.times, number).patches]
        assert colours == [i + 1 == number for i in range(played.n_rounds)]


@pytest.mark.parametrize("algorithm", ["os:_exit", "hierarchical(os:_exit)", "hierarchical(ring, os:_exit)"])
def test_what_is_typed_beside_an_algorithm_is_not_imported(algorithm):
    for call in (lambda: play(Question(STAR, algorithm=algorithm), QUIET), lambda: takes_segments(algorithm, "")):
        with pytest.raises(ConfigError, match="would import code"):
            call()
