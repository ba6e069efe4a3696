"""The file of a saved run: what it can hold, and that a damaged or forged one is an error in one line."""

import json
import zipfile

import numpy as np
import pytest

from ddlsim.compression.payloads import SparsePayload
from ddlsim.errors import ConfigError
from ddlsim.learning.checkpoint import FORMAT, Checkpoint, read, write
from ddlsim.learning.values import Replay
from ddlsim.optim import OptimizerState


def checkpoint(*results):
    replay = Replay(100, dict(enumerate(results)), frozenset({7, 42}), (0.25, float("nan"), 1e-300))
    return Checkpoint(replay, (0.1 + 0.2, 3.0), (1e-9, 1 / 3))


def back(tmp_path, *results):
    write(tmp_path / "run.npz", checkpoint(*results), {"seed": 3})
    found, manifest = read(tmp_path / "run.npz")
    assert manifest == {"seed": 3}
    return found


def test_numbers_come_back_bit_for_bit(tmp_path):
    found = back(tmp_path)
    assert (found.losses, found.times, found.replay.n_values) == ((0.1 + 0.2, 3.0), (1e-9, 1 / 3), 100)
    assert found.replay.pending == {7, 42}
    assert repr(found.replay.scalars) == "(0.25, nan, 1e-300)"


@pytest.mark.parametrize("value", [
    None, True, 5, -0.0, float("inf"), "text", (1, (2.5, None)), [1, [2]], {"a": 1, 3: (4,)}, (),
], ids=repr)  # fmt: skip
def test_plain_values_come_back(value, tmp_path):
    found = back(tmp_path, value).replay.results[0]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.uint8, np.int32, np.bool_])
def test_arrays_come_back_with_type_and_layout(kind, tmp_path):
    flat = np.arange(12).astype(kind)
    given = (flat, flat.reshape(3, 4).T, flat[::2], np.empty((0, 3), kind), kind(3))
    found = back(tmp_path, given).replay.results[0]
    for a, b in zip(given, found, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    assert found[1].flags.f_contiguous
    assert type(found[-1]) is kind


def test_an_array_that_values_share_is_kept_once(tmp_path):
    moment = np.ones(1000, np.float32)
    found = back(tmp_path, moment, (moment, OptimizerState((moment,), 4))).replay.results
    assert found[1][0] is found[0] is found[1][1].moments[0]
    assert found[1][1].n_updates == 4
    assert (tmp_path / "run.npz").stat().st_size < 8000


def test_payloads_and_states_of_ddlsim_come_back(tmp_path):
    payload = SparsePayload(9, np.array([1, 4], np.int32), np.array([0.5, -1.0], np.float32))
    found = back(tmp_path, payload).replay.results[0]
    assert type(found) is SparsePayload
    assert (found.n, found.nbytes, found.values.tolist()) == (9, payload.nbytes, [0.5, -1.0])


def test_what_cannot_be_saved_is_named_and_nothing_is_left(tmp_path):
    for value in (object(), np.array([object()]), {1, 2}):
        with pytest.raises(ConfigError, match=r"contains a .*(object|ndarray|set), which cannot be saved"):
            back(tmp_path, value)
    assert list(tmp_path.iterdir()) == []


def rewritten(tmp_path, change):
    """The file of a run with an optimizer's state, its JSON part changed."""
    path = tmp_path / "run.npz"
    write(path, checkpoint(OptimizerState((np.ones(3),), 4)), {})
    with np.load(path) as file:
        parts = dict(file)
    text = json.loads(parts["run"].tobytes())
    change(text)
    parts["run"] = np.frombuffer(json.dumps(text).encode(), np.uint8)
    np.savez(path, **parts)
    return path


@pytest.mark.parametrize("name", [
    "os:system", "subprocess:Popen", "ddlsim.cli.application:main", "ddlsim.optim.rules:math.prod", "ddlsim.optim",
    "ddlsim.learning.values:Value", "ddlsim.optim.rules:dataclass", "ddlsim.strategies.no_such:Thing",
    "ddlsim.learning.monitor:Training", "ddlsim.optim.rules:SGD",
])  # fmt: skip
def test_a_file_cannot_name_other_classes(name, tmp_path):
    def change(text):
        text["results"][0][1][1] = name

    with pytest.raises(ConfigError, match=r"run.npz: not a saved run, or a damaged one .*; save the run again"):
        read(rewritten(tmp_path, change))


def test_a_file_cannot_bring_pickled_objects(tmp_path):
    path = tmp_path / "run.npz"
    np.savez(path, run=np.array([{"format": 1}], object))
    with pytest.raises(ConfigError, match="damaged"):
        read(path)


@pytest.mark.parametrize("change", [
    lambda text: text.pop("manifest"), lambda text: text.update(results=[[0, ["array", 99]]]),
    lambda text: text.update(results=[[0, ["set", 1]]]), lambda text: text.update(n_values="many"),
    lambda text: text.update(results=[[0, ["array", -1]]]), lambda text: text.update(results=[[0, ["scalar", True]]]),
    lambda text: text.update(results=[[-1, None]]), lambda text: text.update(pending=[0.5]),
    lambda text: text.update(manifest=[]), lambda text: text.update(format="1"), lambda text: text.update(n_values=101),
    lambda text: text["results"][0][1][2].update(more=1), lambda text: text["results"][0][1][2].pop("moments"),
], ids=[
    "no-manifest", "no-array", "no-such-kind", "no-number", "array-from-the-end", "array-of-truth", "value-below-0",
    "half-a-value", "list-manifest", "format-text", "another-count", "more-fields", "fewer-fields",
])  # fmt: skip
def test_other_contents_are_damaged_files(change, tmp_path):
    with pytest.raises(ConfigError, match="not a saved run, or a damaged one"):
        read(rewritten(tmp_path, change))


@pytest.mark.parametrize(("losses", "times"), [
    ((0.5, float("nan")), (1.0,)), ((float("inf"),), (1.0,)), ((0.5,), (2.0, 1.0)), ((0.5,), (-1.0,)),
    ((0.5,), (float("nan"),)),
], ids=["nan-loss", "inf-loss", "backwards", "negative", "nan-time"])  # fmt: skip
def test_losses_and_times_that_no_run_has(losses, times, tmp_path):
    """A run whose loss is not finite has ended as diverged; one whose file says otherwise has been changed."""
    write(tmp_path / "run.npz", Checkpoint(Replay(), losses, times), {})
    with pytest.raises(ConfigError, match=r"run.npz: not a saved run, or a damaged one \(a loss or time"):
        read(tmp_path / "run.npz")


def test_a_number_changed_in_place_is_noticed(tmp_path):
    """The archive is whole and all kinds are right: only the digest tells."""
    path = tmp_path / "run.npz"
    write(path, checkpoint(np.arange(50.0)), {"a": 1})
    with np.load(path) as file:
        parts = dict(file)
    np.savez(path, **{**parts, "array 0": np.arange(50.0) + 1e-9})
    with pytest.raises(ConfigError, match="the contents of the file do not match its digest"):
        read(path)
    np.savez(path, **parts)
    assert read(path)[1] == {"a": 1}


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused(tmp_path, other):
    with pytest.raises(ConfigError, match=rf"the file has format {other}, .* reads format {FORMAT}; resume the"):
        read(rewritten(tmp_path, lambda text: text.update(format=other)))


def test_damage_anywhere_is_noticed(tmp_path):
    """Bytes changed or cut off: an error, or (padding, dates) what was saved."""
    path = tmp_path / "run.npz"
    write(path, checkpoint(np.arange(50.0), OptimizerState((np.ones(3),), 4)), {"a": 1})
    good, n_noticed = path.read_bytes(), 0
    places = range(0, len(good), 7)
    for place in places:
        for bad in (good[:place], good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :]):
            path.write_bytes(bad)
            try:
                found, manifest = read(path)
            except ConfigError:
                n_noticed += 1
            else:
                assert manifest == {"a": 1}
                assert found.replay.results[0].tobytes() == np.arange(50.0).tobytes()
    assert n_noticed > 0.8 * 2 * len(places)


def test_other_files_are_not_saved_runs(tmp_path):
    path = tmp_path / "run.npz"
    for content in (b"", b"hello", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a saved run, or a damaged one"):
            read(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("run.npy", "x")
    with pytest.raises(ConfigError, match="not a saved run, or a damaged one"):
        read(path)
    with pytest.raises(ConfigError, match="not a saved run, or a damaged one"):
        read(tmp_path)
