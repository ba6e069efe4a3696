"""Two teams share one trunk: how much does it slow them down, and what helps?

Two racks of four machines share a trunk that is as fast as one machine's link. Team A uses two machines in each rack,
so team B has to as well. Does it help to swap machines, to start half a step later, or to buy a faster trunk?
"""

import ddlsim
from ddlsim import AllReduce, Background, Experiment, Job, Measured
from ddlsim.cluster import racks


def cluster(trunk):
    return racks(2, 4, bandwidth="10 Gbit/s", latency="10 us", trunk_bandwidth=trunk)


job = Experiment(
    cluster("10 Gbit/s"), "vgg16", AllReduce("ring", "none"), batch_size=32, compute=Measured("600 ms", 32), steps=12
)
across = [Job(job.with_(workers=[0, 1, 4, 5]), "team A"), Job(job.with_(workers=[2, 3, 6, 7]), "team B")]


def show(what, jobs):
    steps = [jobs.concurrent_step_time(name) for name in jobs.names]
    print(f"{what:34s} {steps[0] * 1e3:9.1f} {steps[1] * 1e3:9.1f} ms a step   fairness {jobs.fairness:.3f}")


print(f"{'':34s} {'team A':>9s} {'team B':>9s}")
baseline = ddlsim.simulate(across[0].experiment).step_time
print(f"{'baseline: one team':34s} {baseline * 1e3:9.1f} {baseline * 1e3:9.1f} ms a step")
jobs = ddlsim.simulate_jobs(across)
show("both over the trunk", jobs)
show("B starts 300 ms later", ddlsim.simulate_jobs([across[0], Job(across[1].experiment, "team B", start="300 ms")]))
found = ddlsim.place(across, shift=True)
start = found.jobs[1].start
show(f"the best start, after {start * 1e3:.0f} ms", ddlsim.simulate_jobs(found.jobs))
free = [Job(job.with_(workers=4), "team A"), Job(job.with_(workers=4), "team B")]
show("one rack per team", ddlsim.simulate_jobs(ddlsim.place(free, tries=6).jobs))
show("a trunk of 20 Gbit/s", ddlsim.simulate_jobs(across, cluster("20 Gbit/s")))
backup = Background("h2", "h6", "4 Gbit/s", name="a backup")
print("\nteam A with a backup of 4 Gbit/s on the trunk:", end=" ")
print(f"{ddlsim.simulate(across[0].experiment.with_(background=backup)).step_time * 1e3:.1f} ms a step")
