"""Experiments as bytes for other processes, to which clusters, models and data are sent only once.

Messages refer to these parts by digest. A process that receives a message keeps the parts that came with it, and
requests missing ones. All points that a process simulates therefore share the same object for a part, including its
cached routes.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType

from ddlsim.cluster import Cluster
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.study.fingerprint import Digests
from ddlsim.workload.model import Model

_PARTS = (Cluster, Model, DataSet)
#: maximum bytes of (pickled) parts that a process keeps, least recently used ones dropped
KEPT_NBYTES = 1e9


@dataclass(frozen=True)
class Parcel:
    """Experiments as a pickle, the parts that the receiver may lack (digest -> pickle), and whether to measure the
    stability of each experiment."""

    content: bytes
    parts: Mapping[str, bytes]
    stability: bool


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, digests: Digests | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {
            **copyreg.dispatch_table,
            MappingProxyType: lambda mapping: (MappingProxyType, (dict(mapping),)),
        }
        self.digests = digests
        self.parts: dict[str, object] = {}

    def persistent_id(self, value: object) -> str | None:
        if self.digests is None or not isinstance(value, _PARTS):
            return None
        digest = self.digests.of(value)
        self.parts[digest] = value
        return digest


class Packer:
    """Makes parcels, and remembers which parts have been sent."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._pickles: dict[str, bytes] = {}

    def pack(self, experiments: Sequence[Experiment], wanted: Sequence[str], stability: bool) -> Parcel:
        """Return a parcel with the parts that were in no earlier parcel, and those that are `wanted`.

        Raises ConfigError if an experiment contains objects that cannot be pickled.
        """
        file = io.BytesIO()
        pickler = _Pickler(file, self._digests)
        try:
            pickler.dump(list(experiments))
        except Exception as error:  # pickling calls arbitrary code
            raise ConfigError(
                f"the experiment cannot be sent to other processes ({error}); define its functions and classes in an "
                "importable module, or use jobs=1"
            ) from None
        fresh = [digest for digest in pickler.parts if digest not in self._pickles]
        for digest in fresh:
            part, content = pickler.parts[digest], io.BytesIO()
            # without cached properties, which would be sent along
            _Pickler(content, None).dump(dataclasses.replace(part) if isinstance(part, Cluster) else part)
            self._pickles[digest] = content.getvalue()
        return Parcel(file.getvalue(), {digest: self._pickles[digest] for digest in {*fresh, *wanted}}, stability)


class _Kept:
    """Parts received by this process, up to a maximum size."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, tuple[object, int]] = OrderedDict()
        self._lock = Lock()

    def put(self, pickles: Mapping[str, bytes]) -> None:
        for digest, data in pickles.items():
            part = pickle.loads(data)
            with self._lock:
                self._parts[digest] = part, len(data)
                self._parts.move_to_end(digest)
        with self._lock:
            while len(self._parts) > len(pickles) + 1 and sum(n for _, n in self._parts.values()) > KEPT_NBYTES:
                self._parts.popitem(last=False)

    def get(self, digest: str) -> object:
        with self._lock:
            self._parts.move_to_end(digest)
            return self._parts[digest][0]


_KEPT = _Kept()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.missing: list[str] = []

    def persistent_load(self, digest: object) -> object:
        assert isinstance(digest, str)
        try:
            return _KEPT.get(digest)
        except KeyError:
            self.missing.append(digest)
            return None


def opened(parcel: Parcel) -> list[Experiment] | tuple[str, ...]:
    """Return the experiments in a parcel, or the digests of the parts that this process lacks."""
    _KEPT.put(parcel.parts)
    unpickler = _Unpickler(io.BytesIO(parcel.content))
    experiments = unpickler.load()
    if unpickler.missing:
        return tuple(dict.fromkeys(unpickler.missing))
    assert isinstance(experiments, list)
    return experiments
