"""The fluid network: max-min fair flows and message-level collectives in a compiled event kernel."""

from ddlsim.network.accounts import Accounts
from ddlsim.network.busy import BusyIntervals
from ddlsim.network.idle import schedule_time
from ddlsim.network.network import Completions, Interconnect, Network

__all__ = ["Accounts", "BusyIntervals", "Completions", "Interconnect", "Network", "schedule_time"]
