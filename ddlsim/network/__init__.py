"""The fluid network: max-min fair flows and message-level collectives in a compiled event kernel."""

from ddlsim.network.network import BusyIntervals, Completions, Fabric, Network

__all__ = ["BusyIntervals", "Completions", "Fabric", "Network"]
