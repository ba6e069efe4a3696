"""Work in the background: what it says comes where the page may be changed, the latest wins, cancelling ends it."""

import queue
import threading

import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.explore.jobs import CancelledError, Jobs

#: s after which a test fails rather than hangs
PATIENCE = 60.0


class Page:
    """A page whose calls are done one after the other, by the test."""

    def __init__(self):
        self.calls = queue.Queue()
        self.jobs = Jobs(self.calls.put)
        self.said = []

    def next(self):
        self.calls.get(timeout=PATIENCE)()

    def start(self, name, work):
        self.jobs.start(name, work, self.said.append, lambda text: self.said.append(f"no: {text}"))


class Held:
    """Work that goes on until it is let go, or cancelled if it looks."""

    def __init__(self, result, looks=True):
        self.begun, self.go, self.ended = (threading.Event() for _ in range(3))
        self.result, self.looks = result, looks

    def __call__(self, progress):
        self.begun.set()
        try:
            while not self.go.wait(0.001):
                if self.looks:
                    progress.check()
            return self.result
        finally:
            self.ended.set()


@pytest.fixture
def page():
    return Page()


def test_results_and_errors_are_told_on_the_page(page):
    def refuse(_):
        raise ConfigError("workers = 0: must be 1 or more")

    page.start("a", lambda _: 1)
    page.next()
    page.start("a", refuse)
    page.next()
    assert page.said == [1, "no: workers = 0: must be 1 or more"]


def test_a_mistake_of_the_program_is_told_and_logged(page, caplog):
    page.start("scaling", lambda _: 1 // 0)
    page.next()
    (said,) = page.said
    assert said == "no: scaling failed: ZeroDivisionError; see the terminal (a bug in ddlsim: please report it)"
    assert "Traceback" in caplog.text


def test_the_latest_of_a_name_wins_and_begins_when_the_older_has_ended(page):
    first, second, third = Held(1, looks=False), Held(2), Held(3)
    page.start("a", first)
    assert first.begun.wait(PATIENCE)
    page.start("a", second)
    page.start("a", third)
    assert not second.begun.is_set()
    first.go.set()
    third.go.set()
    page.next()  # what the first has said, which nobody wants
    page.next()
    assert page.said == [3]
    assert not second.begun.is_set()


def test_names_do_not_wait_for_each_other(page):
    slow = Held("slow")
    page.start("a", slow)
    page.start("b", lambda _: "quick")
    page.next()
    assert page.said == ["quick"]
    slow.go.set()
    page.next()
    assert page.said == ["quick", "slow"]


def test_cancelled_work_ends_and_says_nothing(page):
    held = Held(1)
    page.start("a", held)
    assert held.begun.wait(PATIENCE)
    page.jobs.cancel("a")
    assert held.ended.wait(PATIENCE)
    page.jobs.cancel("a")  # nobody minds
    page.start("a", lambda _: 2)
    page.next()
    assert page.said == [2]


def test_what_is_told_after_a_cancel_does_not_come(page):
    page.start("a", lambda progress: progress.tell(lambda: page.said.append("half")))
    while page.jobs.computes("a"):
        pass
    page.jobs.cancel("a")
    page.next()
    page.next()
    assert page.said == []


def test_the_bar_is_there_while_work_goes_on(page, monkeypatch):
    monkeypatch.setattr("ddlsim.explore.jobs.DELAY", 0.0)
    pressed = []
    bar = page.jobs.bar("a", lambda: pressed.append(1))
    (text, share), button = bar[0], bar[1]
    assert not bar.visible
    endless = threading.Event()

    def work(progress):
        assert endless.wait(PATIENCE)
        progress.update(0.4, "2 of 5")
        while True:
            progress.check()

    page.start("a", work)
    page.next()
    assert (bar.visible, text.value, share.value) == (True, "computing ...", -1)
    endless.set()
    page.next()
    assert (text.value, share.value) == ("2 of 5", 40)
    button.clicks += 1
    assert not bar.visible
    assert pressed == [1]
    held = Held(2)
    page.start("a", held)
    page.next()
    assert bar.visible
    held.go.set()
    page.next()
    assert not bar.visible
    assert page.said == [2]


def test_quick_work_shows_no_bar(page):
    bar = page.jobs.bar("a")

    def work(progress):
        progress.update(0.5, "half")
        return 1

    page.start("a", work)
    page.next()
    assert (page.said, bar.visible, page.calls.empty()) == ([1], False, True)


def test_closing_ends_everything(page):
    held = [Held(1), Held(2)]
    for name, work in zip("ab", held, strict=True):
        page.start(name, work)
        assert work.begun.wait(PATIENCE)
    page.jobs.close()
    assert all(work.ended.wait(PATIENCE) for work in held)


def test_check_raises_once_cancelled(page):
    seen = []

    def work(progress):
        progress.check()
        progress.cancelled = True
        with pytest.raises(CancelledError):
            progress.check()
        seen.append(True)

    page.start("a", work)
    page.next()
    assert seen == [True]


def test_a_simulation_ends_when_nobody_wants_it_any_more(page):
    begun = threading.Event()

    class Told(ddlsim.Lognormal):
        """Jitter that says when the first steps are drawn."""

        def sample(self, stream, n):
            begun.set()
            return super().sample(stream, n)

    page.start("run", lambda _: ddlsim.simulate("office-1gbe", "lenet5", steps=10_000_000, jitter=Told(0.1)))
    assert begun.wait(PATIENCE)
    page.start("run", lambda _: "the next")
    while not page.said:
        page.next()
    assert page.said == ["the next"]
