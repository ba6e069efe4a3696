"""Clusters: machines, links, routing, generators, file formats. Start with :func:`load_cluster`.

Names are loaded when first used, so that importing ddlsim does not import networkx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ddlsim.cluster.cluster import Cluster, ClusterLike, Routes

if TYPE_CHECKING:
    from ddlsim.cluster.catalogue import cluster_names, load_cluster
    from ddlsim.cluster.details import LinkDetail, LinkDetails, with_detail
    from ddlsim.cluster.generators import (
        dragonfly,
        fat_tree,
        fully_connected,
        hypercube,
        leaf_spine,
        line,
        racks,
        ring,
        star,
        torus,
        two_racks,
    )
    from ddlsim.cluster.nodes import Host, MultiGpu

__all__ = [
    "Cluster",
    "ClusterLike",
    "Host",
    "LinkDetail",
    "LinkDetails",
    "MultiGpu",
    "Routes",
    "cluster_names",
    "dragonfly",
    "fat_tree",
    "fully_connected",
    "hypercube",
    "leaf_spine",
    "line",
    "load_cluster",
    "racks",
    "ring",
    "star",
    "torus",
    "two_racks",
    "with_detail",
]

_HOME = {"load_cluster": "catalogue", "cluster_names": "catalogue", "Host": "nodes", "MultiGpu": "nodes"}
_HOME |= dict.fromkeys(("LinkDetail", "LinkDetails", "with_detail"), "details")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'generators')}"), name)
