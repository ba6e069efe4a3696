"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .catalogue import cluster_names as cluster_names, load_cluster as load_cluster
from .cluster import Cluster as Cluster, ClusterLike as ClusterLike, Routes as Routes
from .details import LinkDetail as LinkDetail, LinkDetails as LinkDetails, with_detail as with_detail
from .generators import (
    fully_connected as fully_connected,
    hypercube as hypercube,
    line as line,
    ring as ring,
    torus as torus,
)
from .storage import Endpoints as Endpoints
from .generators import (
    dragonfly as dragonfly,
    fat_tree as fat_tree,
    leaf_spine as leaf_spine,
    racks as racks,
    star as star,
    two_racks as two_racks,
)
from .nodes import Host as Host, MultiGpu as MultiGpu
from .storage import with_storage as with_storage
