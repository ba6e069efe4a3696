"""Load a :class:`Cluster` from a name, a path or a graph."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files, loaded_from, split_options, text_of
from ddlsim.cluster.cluster import Cluster, ClusterLike
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plain import decoded, parse_value, read_bytes

_NATIVE_SUFFIXES = (".toml", ".json")


def cluster_names() -> list[str]:
    """Return the sorted names of the bundled clusters."""
    return sorted(bundled_files("topologies"))


@checked
def load_cluster(source: ClusterLike) -> Cluster:
    """Load a cluster by its bundled name, from a file, or from a networkx graph.

    source  a bundled name (see :func:`cluster_names`), the path to a file, a networkx graph, or a :class:`Cluster`,
            which is returned unchanged. Supported formats are ``.toml``, networkx graphs in ``.json`` (node-link) or
            ``.graphml`` files, and topology files from other tools, which are recognised by their content
            (:data:`ddlsim.imports.detect.TOPOLOGIES`)

    Append ``+key=value`` to a name or path to override a key in the file's [generator], [host] or [link] table, as in
    ``"dgx-h100-pod+n_leaves=64"`` or ``"cloud-25g-16x8-v100+transport=ideal"``. For files from other tools,
    ``+key=value`` supplies a value that the file does not contain, as in ``"topo.txt+bandwidth=25 GB/s"``
    (:func:`ddlsim.imports.read_any`).

    Raises :class:`ConfigError` for an unknown name or an invalid file. The one-line message gives the file, the field,
    its value and a remedy.
    """
    if isinstance(source, Cluster):
        return source
    if not isinstance(source, str | Path):
        return Cluster.from_graph(source)
    stem, settings = split_options(str(source))
    path = Path(stem)
    if path.suffix in (*_NATIVE_SUFFIXES, ".graphml") or os.path.isfile(path):
        return loaded_from(_load_file(path, settings), source)
    bundled = bundled_files("topologies")
    if stem in bundled:
        cluster = _load_bundled(bundled[stem], tuple(settings), os.stat(bundled[stem]).st_mtime_ns)
        return loaded_from(cluster, source)
    if path.suffix or len(path.parts) > 1:  # bundled clusters have no such names
        raise ConfigError(f"{path}: no such file; use a path or a bundled cluster (see: ddlsim topologies)")
    raise unknown_name("cluster", stem, bundled)


def bundled_name(source: ClusterLike) -> str | None:
    """Return the name, with options, of a bundled cluster or of the one that it was loaded from; None for clusters of
    files and graphs."""
    name = str((source if isinstance(source, str | Path) else text_of(source)) or "")
    stem = Path(split_options(name)[0])
    return name if len(stem.parts) == 1 and not stem.suffix and not os.path.isfile(stem) else None


@functools.lru_cache(maxsize=32)  # at least the number of bundled clusters
def _load_bundled(path: Path, settings: tuple[str, ...], changed: int) -> Cluster:
    """Load a bundled file, cached for studies; `changed` (modification time) is part of the cache key."""
    return _load_file(path, settings)


def _load_file(path: Path, settings: Sequence[str]) -> Cluster:
    data = read_bytes(path, "no such file; use a path or a bundled cluster (see: ddlsim topologies)")
    if path.suffix not in _NATIVE_SUFFIXES:
        from ddlsim.imports import read_topology

        pairs = [context.partition("=") for context in settings]
        for context, (_, is_setting, _) in zip(settings, pairs, strict=True):
            if not is_setting:
                raise ConfigError(
                    f"+{context}: expected +name=value (such as +bandwidth=25 GB/s) for a value that the file lacks"
                )
        return read_topology(path, {name: parse_value(value) for name, _, value in pairs})
    from ddlsim.cluster import files

    return files.read_cluster(path, decoded(data, str(path)), settings)
