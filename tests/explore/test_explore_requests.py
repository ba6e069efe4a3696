"""What a request may do: fill in the form, and nothing else. Every screen runs with its defaults after Start."""

import asyncio
import contextlib
import re
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import quantity

pytest.importorskip("panel")

import panel as pn
from tornado.httpclient import HTTPRequest
from tornado.httputil import HTTPHeaders
from tornado.websocket import websocket_connect

from ddlsim.explore import app
from ddlsim.explore.app import Foreign, fill_in
from ddlsim.explore.components import UPLOADED, message
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.setup import FIELDS, Setup

#: screens that simulate when they are shown; *Learning* does by a button of its own
SIMULATING = ("run", "what-if", "scaling", "collective")


class Now(Jobs):
    """Work that is done at once; `names` are those of what was started."""

    def __init__(self):
        super().__init__(lambda call: call())
        self.names = []

    def start(self, name, work, done, failed):
        self.names.append(name)
        try:
            result = work(Progress(lambda call: call(), lambda share, text: None))
        except ddlsim.DdlsimError as error:
            failed(str(error))
        else:
            done(result)


def texts(view):
    return [pane.object for pane in view.select(pn.pane.HTML) if pane.object]


def errors(view):
    return [text for text in texts(view) if 'role="alert"' in text]


def button(view, label):
    return next(each for each in view.select(pn.widgets.Button) if each.label == label)


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({"Host": "localhost:5006"}, False),
        ({"Host": "LOCALHOST"}, False),
        ({"Host": "127.0.0.1:5006"}, False),
        ({"Host": "127.8.8.8"}, False),
        ({"Host": "[::1]:5006"}, False),
        ({"Host": "lab.example:80"}, False),
        ({"Host": "localhost:5006", "Origin": "http://localhost:5006"}, False),
        ({"Host": "localhost:5006", "Origin": "https://lab.example"}, False),
        ({}, True),
        ({"Host": ""}, True),
        ({"Host": "evil.example"}, True),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, True),
        ({"Host": "localhost.evil.example"}, True),
        ({"Host": "127.0.0.1.evil.example"}, True),
        ({"Host": "10.0.0.7"}, True),
        ({"Host": "[::1"}, True),
        ({"Host": "localhost:5006", "Origin": "http://evil.example"}, True),
        ({"Host": "localhost:5006", "Origin": "http://localhost:8000"}, True),
        ({"Host": "localhost:5006", "Origin": "null"}, True),
        ({"Host": "localhost:5006", "Origin": "http://[::1"}, True),
    ],
)
def test_only_names_of_this_machine_are_accepted(headers, foreign):
    request = SimpleNamespace(headers=HTTPHeaders(headers))
    assert (Foreign(["lab.example"]).match(request) is not None) is foreign


@pytest.fixture(scope="module")
def served():
    """A server of the explorer as the command makes it: its port."""
    before, made, ready = (quantity.MAX_NODES, quantity.MAX_LINKS), [], threading.Event()

    def serve():
        asyncio.set_event_loop(asyncio.new_event_loop())
        made.append(app.server(None, None, 0, False, ["lab.example"]))
        made[0].start()
        made[0].io_loop.add_callback(ready.set)
        made[0].io_loop.start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    yield made[0].port
    made[0].io_loop.add_callback(made[0].io_loop.stop)
    thread.join()
    quantity.limit_size(*before)


def get(port, query="", **headers):
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{query}", headers=headers)
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_a_server_refuses_other_names_and_websockets_of_other_pages(served):
    assert get(served)[0] == get(served, Host="lab.example")[0] == 200
    assert get(served, Host="evil.example") == (403, app.REFUSAL)
    assert get(served, "static/js/bokeh.min.js", Host="evil.example")[0] == 403
    token = re.search(r'"token":"([^"]+)"', get(served)[1])[1]

    async def opens(host, origin):
        request = HTTPRequest(f"ws://127.0.0.1:{served}/ws", headers={"Host": host, "Origin": origin})
        try:
            connection = await websocket_connect(request, subprotocols=["bokeh", token])
            connection.close()
            while await connection.read_message() is not None:
                pass
        except Exception as error:  # whatever the client makes of the answer
            return str(error)
        return "opened"

    here = f"localhost:{served}"
    assert asyncio.run(opens(here, f"http://{here}")) == "opened"
    assert asyncio.run(opens("lab.example", "https://lab.example")) == "opened"
    for host, origin in (("evil.example", "http://evil.example"), (here, "http://evil.example"), (here, "null")):
        assert "403" in asyncio.run(opens(host, origin))


@pytest.mark.slow
@pytest.mark.parametrize("screen", ["cluster", *SIMULATING, "learning"])
def test_a_get_runs_no_code_and_simulates_nothing(served, monkeypatch, tmp_path, screen):
    (tmp_path / "evil_of_address.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    for place in ("ddlsim.run.run", "ddlsim.explore.rounds.play", "ddlsim.explore.screens.scaling.Study.run"):
        monkeypatch.setattr(place, lambda *arguments, **more: called.append(arguments))
    for table in ('{"algorithm":"evil_of_address:ring"}', '{"overlap":{"type":"evil_of_address:X"}}'):
        assert get(served, f"?settings={quote(table)}&screen={screen}")[0] == 200
    code = 'fabric = { algorithm = "evil_of_address:ring" }'
    assert get(served, f"?screen={screen}&others={quote(code)}")[0] == 200
    assert get(served, f"?screen={screen}")[0] == 200
    assert "evil_of_address" not in sys.modules
    assert called == []


@pytest.mark.parametrize("screen", SIMULATING)
def test_an_address_fills_in_the_form_and_start_simulates(screen):
    setup, jobs = Setup(started=False), Now()
    address = {"cluster": "office-1gbe", "model": "lenet5", "steps": 2, "workers": 2, "screen": screen}
    assert fill_in(setup, address) == []
    buttons, place = app.screens(setup, jobs)
    setup.batch_size = 16
    assert {name: getattr(setup, name) for name in address} == address
    assert jobs.names == []
    assert button(buttons, "Start").visible
    button(buttons, "Start").clicks += 1
    assert screen in jobs.names
    assert errors(place) == []
    assert not button(buttons, "Start").visible
    n = len(jobs.names)
    setup.batch_size = 8
    assert len(jobs.names) == n + (screen != "collective" or 1)


@pytest.mark.parametrize("cluster", [
    "dgx1-v100", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "two", "cloud-25g-16x8-v100", "lab-heterogeneous", "office-1gbe", "aws-p3-2xlarge", "dgx-h100-pod",
    )),
])  # fmt: skip
@pytest.mark.parametrize("screen", [module.NAME for module in app.SCREENS])
def test_every_screen_runs_with_its_defaults(screen, cluster, tmp_path, monkeypatch):
    if cluster == "two":  # fewer than the screens begin with
        cluster = str(tmp_path / "two.toml")
        ddlsim.load_cluster(ddlsim.cluster.star(2, bandwidth="1 Gbit/s", latency="50 us")).save(cluster)
    monkeypatch.setattr("ddlsim.explore.screens.learning.Lesson.epochs", 0.2)
    setup, jobs = Setup(cluster=cluster, model="lenet5", screen=screen), Now()
    _, place = app.screens(setup, jobs)
    if screen == "learning":
        button(place, "Start").clicks += 1
    assert screen in jobs.names
    assert errors(place) == []


@pytest.mark.parametrize(
    ("query", "left_out"),
    [
        ({"steps": 10**8}, "steps in the address is ignored: 100000000 exceeds the limit of 1000; enter"),
        ({"workers": 10**6}, "workers in the address is ignored"),
        ({"batch_size": 1e300}, "batch_size in the address is ignored"),
        ({"batch_size": "much"}, "batch_size in the address is ignored"),
        ({"others": "x" * 300}, "others in the address is ignored: the value has 300 characters"),
        ({"others": "# \n" * 1000}, "others in the address is ignored: the value has 3000 characters"),
        ({"cluster": "/etc/" + "../etc/" * 50 + "passwd"}, "cluster in the address is ignored"),
        ({"settings": {"a": ["x" * 10] * 1000}}, "settings in the address is ignored"),
        ({"settings": eval("[" * 150 + "]" * 150)}, "settings in the address is ignored: settings: nested more"),
        ({"settings": [1]}, "settings in the address is ignored"),
        ({"cluster": "//evil.example/share/x.toml"}, "cluster in the address is ignored: the value refers to a folder"),
        ({"model": "\\\\evil.example\\x.toml"}, "model in the address is ignored: the value refers to a folder"),
        ({"others": 'compute = { type = "traced", path = "//evil.example/x" }'}, "others in the address is ignored"),
    ],
)  # fmt: skip
def test_an_address_has_limits(query, left_out):
    setup = Setup()
    (line,) = fill_in(setup, {**query, "seed": 3, "theme": "dark"})
    assert line.startswith(left_out)
    assert setup.state() == Setup(seed=3).state()


WORDS = st.sampled_from([
    "evil_of_fuzz:ring", "hierarchical(evil_of_fuzz:ring, ring)", "ring", "25 MiB", "ddp", "top-k", "k-sync", "fsdp",
    "all-reduce", "office-1gbe", "lenet5", "run", "", "bf16", 'fabric = { algorithm = "evil_of_fuzz:ring" }', "1e999",
    'jitter = { type = "evil_of_fuzz:X" }', 'background = [{ experiment = { cluster = "evil_of_fuzz:x" } }]',
    "[[[", "\x00",
])  # fmt: skip
KEYS = st.sampled_from(["type", "algorithm", "overlap", "inner", "compressor", "density", "k", "outer", "tensor"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "screen", "theme", "started"]), VALUES, max_size=5))
def test_any_address_is_taken_or_left_out_and_imports_nothing(query):
    setup = Setup(started=False)
    for line in fill_in(setup, query):
        assert " in the address is ignored: " in line
        assert "\n" not in line
    assert not setup.started
    with contextlib.suppress(ddlsim.DdlsimError):
        setup.experiment()
    assert "evil_of_fuzz" not in sys.modules


@pytest.mark.parametrize("name", ["aws-10g-16+n_hosts=40000", "office-1gbe+n_hosts=40000", "selene+n_leaves=1000000"])
def test_no_huge_cluster_is_built(name, monkeypatch):
    monkeypatch.setattr(quantity, "MAX_NODES", quantity.MAX_NODES)  # put back afterwards
    monkeypatch.setattr(quantity, "MAX_LINKS", quantity.MAX_LINKS)
    quantity.limit_size(app.MOST_NODES, app.MOST_LINKS)
    with pytest.raises(ddlsim.ConfigError, match=r"limit of 20000|must be"):
        ddlsim.load_cluster(name)


PRIVATE = {
    "passwd": "root:x:0:0:SECRET\n", "private.toml": 'SECRET = "SECRET"\n[SECRET]\nx = 1\n',
    "private.json": '{"nodes": [], "edges": [], "directed": "SECRET"}', "private.csv": "SECRET,b\n1,SECRET\n",
    "private.xml": "<SECRET a='SECRET'/>", "private.graphml": "<graphml><SECRET/></graphml>",
}  # fmt: skip
FIELDS_OF_FILES = (
    'compute = {{ type = "traced", path = "{}" }}',
    'checkpoints = {{ every = "1 h", to = "peers" }}\nfailures = {{ trace = "{}" }}',
    'training = {{ data = "digits", epochs = 1 }}\ntime_model = "{}"',
    'training = {{ data = "{}", epochs = 1 }}',
    'background = [{{ experiment = "{}" }}]',
    'background = [{{ experiment = {{ cluster = "{}" }} }}]',
    'background = [{{ type = "background", source = "h0", target = "h1", trace = "{}" }}]',
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_no_page_quotes_a_file_that_is_no_cluster(name, tmp_path):
    path = tmp_path / name
    path.write_text(PRIVATE[name])
    states = [{"cluster": str(path)}, {"model": str(path)}, {"cluster": f"{path}+bandwidth=1 Gbit/s"}]
    states += [{"others": field.format(path)} for field in FIELDS_OF_FILES]
    for state in states:
        with pytest.raises(ddlsim.DdlsimError) as error:
            ddlsim.simulate(Setup(**{"cluster": "office-1gbe", "model": "lenet5", "steps": 1, **state}).experiment())
        assert "SECRET" not in message(str(error.value)).object
    place = app.screens(Setup(screen="cluster", cluster=str(path)), Now())[1]
    assert errors(place) == [message(f"{path}: SECRET").object]
    assert f"{path}: cannot be used here; run the ddlsim command in a terminal to see the reason" in errors(place)[0]
    for card in place.select(pn.Card):  # the exported file, too
        card.collapsed = False
    assert not any("SECRET" in text for text in texts(place))
    others = f'checkpoints = {{ every = "1 h", to = "peers" }}\nfailures = {{ trace = "{path}" }}'
    place = app.screens(Setup(screen="scaling", cluster="office-1gbe", model="lenet5", others=others), Now())[1]
    assert "SECRET" not in "".join(texts(place))


def test_errors_end_with_the_name_of_a_file(tmp_path):
    path = tmp_path / "private"
    path.write_text("SECRET")
    for place in ("", "other fields: compute: "):
        for line in ("", ":7"):
            text = message(f"{place}{path}{line}: begins with 'SECRET', which: is none").object
            assert f"{place}{path}: cannot be used here; run the ddlsim command in a terminal to see the reason" in text
            assert "SECRET" not in text
    assert "office-1gbee" in message("unknown cluster 'office-1gbee': did you mean").object


@pytest.mark.slow
def test_errors_in_uploaded_files_and_in_settings_are_told_in_full(tmp_path):
    folder = tmp_path / f"{UPLOADED}x"
    folder.mkdir()
    (folder / "own.toml").write_text("lnks = 1\n")
    place = app.screens(Setup(screen="cluster", cluster=str(folder / "own.toml")), Now())[1]
    assert "unknown key &#x27;lnks&#x27;" in errors(place)[0]
    place = app.screens(Setup(screen="cluster", cluster="office-1gbe+n_host=3"), Now())[1]
    assert "did you mean &#x27;n_hosts&#x27;" in errors(place)[0]
