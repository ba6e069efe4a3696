"""*Collective*: the messages of a collective on the chosen cluster, round by round."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import panel as pn

from ddlsim.collectives import KINDS, algorithm_names
from ddlsim.errors import ConfigError
from ddlsim.explore.components import Exports, File, LazyCard, html, image, message, side_by_side, table, tiles
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.rounds import Played, Question, in_words, play, takes_segments
from ddlsim.explore.setup import Setup, at_most
from ddlsim.readable import seconds, si
from ddlsim.report.animation import Frames, messages_of, ranges, ring_of_ranks, round_times

NAME = "collective"
TITLE = "Collective"
#: time per round in animations, in ms, and more per rank, because pictures of more ranks take longer to draw
PACE, PER_RANK = 700, 20
SIDE_BY_SIDE = '<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:center">{}{}</div>'
_FLEX = "flex:{} 1 {}px;min-width:0"
WORDS = {kind: kind.replace("_", "-") for kind in KINDS}


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    return _Screen(setup, jobs).view


class _Screen:
    def __init__(self, setup: Setup, jobs: Jobs) -> None:
        self._setup, self._jobs = setup, jobs
        self._played: Played | None = None
        wide = {"sizing_mode": "stretch_width", "min_width": 130}
        self._kind = pn.widgets.Select(label="Collective", options={WORDS[kind]: kind for kind in KINDS}, **wide)
        names = algorithm_names("all_reduce")
        self._algorithm = pn.widgets.Select(label="Algorithm", options=names, value="ring", **wide)
        self._arguments = pn.widgets.TextInput(label="Its arguments", placeholder="none", **wide)
        self._ranks = pn.widgets.IntInput(label="Ranks", value=at_most(8, setup), start=1, end=64, **wide)
        self._size = pn.widgets.TextInput(label="Bytes per rank", value="100 MB", **wide)
        self._segments = pn.widgets.IntInput(label="Segments", value=4, start=1, end=64, visible=False, **wide)
        self._said = message("")
        self._numbers, self._words = html(), html(css_classes=["words"])
        self._pictures, self._bars, self._formula = html(), html(), html()
        self._player = pn.widgets.Player(
            start=0, end=1, value=0, loop_policy="once", show_loop_controls=False, show_value=False,
            visible_buttons=["first", "previous", "pause", "play", "next", "last"], sizing_mode="stretch_width",
            max_width=520, height=60, margin=(4, 8),
        )  # fmt: skip
        self._table = html()
        self._listed = LazyCard("Messages of this round", self._list, self._table)
        self._exports = Exports(lambda: files(self._question()))
        self._kind.param.watch(self._kind_changed, "value")
        for widget in (self._algorithm, self._arguments, self._ranks, self._size, self._segments):
            widget.param.watch(lambda _: self._ask(), "value")
        self._player.param.watch(lambda _: self._show(), "value")
        self.view = pn.Column(
            side_by_side(
                (self._kind, self._algorithm, self._arguments, self._ranks, self._size, self._segments), width=175
            ),
            self._said, jobs.bar(NAME), self._numbers, self._player, self._words, self._pictures, self._bars,
            self._formula, self._listed.card, self._exports.card, sizing_mode="stretch_width",
        )  # fmt: skip
        setup.when_shown(NAME, self._ask)

    def _question(self) -> Question:
        words = str(self._arguments.value or "").strip()
        algorithm = f"{self._algorithm.value}({words})" if words else str(self._algorithm.value)
        if self._ranks.value is None:
            raise ConfigError("ranks is empty; enter a number")
        segments = self._segments.value if takes_segments(algorithm, self._kind.value) else None
        return Question(
            self._setup.cluster.strip(), self._kind.value, algorithm, self._ranks.value, str(self._size.value), segments
        )

    def _kind_changed(self, _: object) -> None:
        before = self._algorithm.value
        self._algorithm.options = algorithm_names(self._kind.value)
        if before == self._algorithm.value:
            self._ask()

    def _ask(self) -> None:
        def prepared() -> Callable[[Progress], Played]:
            self._segments.visible = takes_segments(self._algorithm.value, self._kind.value)
            return partial(play, self._question())

        self._jobs.ask(NAME, prepared, self._done, self._failed)

    def _failed(self, text: str) -> None:
        self._said.object = message(text).object
        self._played = None
        for pane in (self._numbers, self._words, self._pictures, self._bars, self._formula):
            pane.object = ""
        self._listed.stale()

    def _done(self, played: Played) -> None:
        self._said.object = ""
        self._played, self._frames = played, Frames(played.schedule, played.states)
        self._numbers.object, self._formula.object = tiles(numbers(played)), closed_form(played)
        self._exports.stale()
        pace = PACE + PER_RANK * played.question.n_ranks
        end, disabled = max(played.n_rounds, 1), not played.n_rounds
        self._player.param.update(start=0, end=end, value=0, interval=pace, disabled=disabled)
        self._show()

    def _show(self) -> None:
        if self._played is None:
            return
        number = min(int(self._player.value), self._played.n_rounds)
        self._words.object = f'<div role="status">{in_words(self._played, number)}</div>'
        both = pictures(self._frames, number)
        self._pictures.object = SIDE_BY_SIDE.format(*both)
        self._bars.object = bars(self._played, number)
        self._listed.stale()

    def _list(self) -> None:
        self._table.object = ""
        if self._played is not None:
            sent = messages_of(self._played.states[min(int(self._player.value), self._played.n_rounds)])
            rows = [
                [str(src), str(dst), ranges(chunks), "added" if added else "written over"]
                for src, dst, added, chunks in sent
            ]
            self._table.object = table(["from", "to", "chunks", "how"], rows, 9) if rows else "no messages"


def pictures(frames: Frames, number: int) -> tuple[str, str]:
    """Return the messages of round `number` between the ranks, and the data on every rank after it, as images."""
    state = frames.played[number]
    words = "; ".join(f"{src} to {dst}: {ranges(chunks)}" for src, dst, _, chunks in messages_of(state))
    sent = f"Messages of the round (sender, receiver, chunks): {words or 'no messages'}"
    status = f"{int(state.whole.sum())} of {int(state.required.sum())} required blocks are complete"
    ranks, chunks = ring_of_ranks(state), frames.draw(number)
    return image(ranks, sent, _FLEX.format(1, 240)), image(chunks, f"Ranks by chunks: {status}", _FLEX.format(2, 280))


def bars(played: Played, number: int) -> str:
    """Return the time of each round as an image; that of round `number` is coloured."""
    if not played.n_rounds:
        return ""
    return f"<div>Time of each round</div>{image(round_times(played.times, number), 'Time of each round')}"


def numbers(played: Played) -> Sequence[tuple[str, str]]:
    """Return labelled numbers of the whole collective."""
    question = played.question
    labelled = [("time", seconds(played.times[-1])), ("rounds", str(played.n_rounds))]
    labelled.append(("messages", f"{played.schedule.n_messages:,}"))
    if played.n_rounds:
        labelled.append(("bus bandwidth", si(played.bus_bandwidth, "B/s")))
    if played.closed_form is not None:
        labelled.append(("closed form", seconds(played.closed_form.time)))
    return [(f"{WORDS[question.kind]}, {question.n_ranks} ranks", question.algorithm), *labelled]


def closed_form(played: Played) -> str:
    """Return the formula and its assumptions as HTML."""
    form = played.closed_form
    if form is None:
        return ""
    about = "of the slowest pair of ranks; here, pairs differ, and the formula ignores shared links"
    about = "on this cluster, the same for every two ranks" if form.uniform else about
    numbers = f"alpha = {seconds(form.alpha)}, 1/beta = {si(1.0 / form.beta, 'B/s')}"
    return f'<div class="note"><b>Closed form</b> {form.formula}, {numbers}: {about}.</div>'


def files(question: Question) -> list[File]:
    """Return the program that computes the same time and rounds. Experiment files cannot describe collectives."""
    algorithm, imports = json.dumps(question.algorithm), ""
    if question.n_segments is not None and takes_segments(question.algorithm, question.kind):
        imports = "from functools import partial\n\n"
        algorithm = f"partial(find({algorithm}, {json.dumps(question.kind)}), n_segments={question.n_segments})"
    extra = "from ddlsim.collectives.lookup import find\n" if imports else ""
    program = (
        f"{imports}import ddlsim\nfrom ddlsim.collectives import build, states\n{extra}from ddlsim.units import si\n\n"
        f"cluster = ddlsim.load_cluster({json.dumps(question.cluster)})\n"
        f"algorithm = {algorithm}\nn_ranks, nbytes, kind = {question.n_ranks}, {json.dumps(question.nbytes)}, "
        f"{json.dumps(question.kind)}\n\n"
        "seconds = ddlsim.collective_time(cluster, algorithm, nbytes, kind=kind, ranks=n_ranks)\n"
        'print(f"{1e3 * seconds:.6g} ms")\n\n'
        "nodes = cluster.workers[:n_ranks].tolist()\n"
        'size, hosts = si(nbytes, "bytes"), cluster.host_of[nodes].tolist()\n'
        "schedule = build(algorithm, n_ranks, size, hosts, kind, (cluster, nodes))\n"
        "for state in states(schedule):\n"
        '    print(f"after round {state.round}: {state.done.sum()} of {n_ranks} ranks whole")\n'
    )
    return [File("collective.py", program)]
