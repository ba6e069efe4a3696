"""Several jobs on one cluster: their runs, their mutual slowdowns, and better placements for them."""

from ddlsim.jobs.simulate import JobsFile as JobsFile, load_jobs as load_jobs
from ddlsim.jobs.jobs import Jobs as Jobs
from ddlsim.jobs.placement import Placements as Placements, place as place
from ddlsim.jobs.simulate import simulate_jobs as simulate_jobs
