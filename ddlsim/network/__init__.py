"""The fluid network: max-min fair flows and message-level collectives in a compiled event kernel."""

from ddlsim.network.accounts import Accounts as Accounts
from ddlsim.network.busy import BusyIntervals as BusyIntervals
from ddlsim.network.engine import Interconnect as Interconnect
from ddlsim.network.network import schedule_time as schedule_time
from ddlsim.network.network import Completions as Completions, Network as Network
