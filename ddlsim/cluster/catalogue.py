"""From what a user names a cluster by to the :class:`Cluster`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files, split_options
from ddlsim.cluster.cluster import Cluster, ClusterLike
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plain import decoded, read_bytes

_SUFFIXES = (".toml", ".json", ".graphml")


def cluster_names() -> list[str]:
    """Return the names of the bundled clusters, sorted."""
    return sorted(bundled_files("topologies"))


@checked
def load_cluster(source: ClusterLike) -> Cluster:
    """Return the cluster that `source` names.

    source  a bundled name (see :func:`cluster_names`); the path of a ``.toml`` file, or of a networkx graph
            in ``.json`` (node-link) or ``.graphml``; a networkx graph; or a cluster, which is returned as it
            is. ``"name+key=value"`` sets a key of the file's [generator] or [host], as in
            ``"dgx-h100-pod+n_leaves=64"``; so does ``"path+key=value"``

    Raises :class:`ConfigError`, in one line with file, field, value and remedy, for what cannot be used.
    """
    if isinstance(source, Cluster):
        return source
    if not isinstance(source, str | Path):
        return Cluster.from_graph(source)
    stem, settings = split_options(str(source))
    path = Path(stem)
    if path.suffix in _SUFFIXES or os.path.isfile(path):
        return _load_file(path, settings)
    bundled = bundled_files("topologies")
    if stem in bundled:
        return _load_bundled(bundled[stem], tuple(settings), os.stat(bundled[stem]).st_mtime_ns)
    if path.suffix or len(path.parts) != 1:  # no bundled cluster has a name like that
        raise ConfigError(f"{path}: no such file; give a path or a bundled cluster (see: ddlsim topologies)")
    raise unknown_name("cluster", stem, bundled)


@functools.lru_cache(maxsize=8)
def _load_bundled(path: Path, settings: tuple[str, ...], changed: int) -> Cluster:
    """Return the cluster of a bundled file as it was `changed` last; runs of a study all name the same."""
    return _load_file(path, settings)


def _load_file(path: Path, settings: Sequence[str]) -> Cluster:
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: the format {path.suffix!r} is unknown; use one of {', '.join(_SUFFIXES)}")
    from ddlsim.cluster import files

    data = read_bytes(path, "no such file; give a path or a bundled cluster (see: ddlsim topologies)")
    return files.read_cluster(path, decoded(data, str(path)), settings)
