"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .astra import read_astra as read_astra
from .timing import to_measurements as to_measurements
from .graphml import read_graphml as read_graphml
from .horovod import HorovodTimeline as HorovodTimeline, read_horovod as read_horovod
from .kineto import (
    KinetoTrace as KinetoTrace,
    fastest_over_ranks as fastest_over_ranks,
    profile_workload as profile_workload,
    read_kineto as read_kineto,
)
from .kineto import LayerTime as LayerTime
from .lstopo import read_lstopo as read_lstopo
from .mllog import MlperfRun as MlperfRun, read_mllog as read_mllog
from .nccl_tests import read_nccl_tests as read_nccl_tests
from .nccl_topology import read_nccl_topology as read_nccl_topology
from .network_tools import read_iperf3 as read_iperf3, read_ping as read_ping
from .nvidia_smi import read_nvidia_smi as read_nvidia_smi
from .osu import read_osu as read_osu
from .rocm_smi import read_rocm_smi as read_rocm_smi
from .simgrid import read_simgrid as read_simgrid
from .detect import detect_kind as detect_kind, read_any as read_any, read_topology as read_topology
from .throughput import read_throughput as read_throughput
from .text import (
    SourceText as SourceText,
    nonnegative_number as nonnegative_number,
    positive_number as positive_number,
    read_text as read_text,
)
from .timing import Timing as Timing
