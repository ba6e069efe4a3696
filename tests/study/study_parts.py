"""What the tests of studies share: a small cluster, and strategies that go wrong on purpose."""

import os
from dataclasses import dataclass
from pathlib import Path

import ddlsim
from ddlsim.cluster import Host, star

BASE = ddlsim.Experiment(
    ddlsim.Cluster.from_graph(star(8, bandwidth="10 Gbit/s", latency="10 us", host=Host(device="v100")), "eight"),
    "lenet5", batch_size=32, steps=2, warmup=0, jitter=ddlsim.Lognormal(0.1),
)  # fmt: skip
#: looks at strategies, sizes, the network and random numbers
VARY = {
    "workers": [2, 4],
    "strategy": [ddlsim.AllReduce("ring"), ddlsim.ParameterServer(2), ddlsim.LocalSGD(2)],
    "cluster.nic.bandwidth": ["1 Gbit/s", "10 Gbit/s"],
}


@dataclass(frozen=True)
class Raises(ddlsim.AllReduce):
    """Goes wrong, not for a reason that the user could have known."""

    def start(self, context):
        raise ZeroDivisionError("no such luck")


@dataclass(frozen=True)
class Kills(ddlsim.AllReduce):
    """Ends the process that simulates it, the first `n_times` times: it notes them in a file."""

    notes: str = ""
    n_times: int = 1000

    def start(self, context):
        path = Path(self.notes)
        deaths = path.read_text(encoding="utf-8") if path.exists() else ""
        if len(deaths) < self.n_times:
            path.write_text(deaths + "x", encoding="utf-8")
            os._exit(1)
        super().start(context)


@dataclass(frozen=True)
class Notes(ddlsim.AllReduce):
    """Adds a line to a file for each time that it is simulated, waits until `together` processes have, and takes
    `seconds` of real time."""

    notes: str = ""
    seconds: float = 0.0
    together: int = 0

    def start(self, context):
        import time

        notes = Path(self.notes)
        with notes.open("a", encoding="utf-8") as file:
            file.write(f"{len(context.workers)} {os.getpid()}\n")
        while len({line.split()[1] for line in notes.read_text(encoding="utf-8").splitlines()}) < self.together:
            time.sleep(0.02)
        time.sleep(self.seconds)
        super().start(context)
