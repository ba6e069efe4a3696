"""What strategies are written with: the event loop, workers, groups, and what carries bytes and values between them."""

from ddlsim.runtime.algorithms import schedule_time
from ddlsim.runtime.setting import Setting, Strategy

__all__ = ["Setting", "Strategy", "schedule_time"]
