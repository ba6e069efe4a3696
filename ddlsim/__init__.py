"""ddlsim: simulate distributed SGD before renting the cluster."""

__version__ = "0.1.0"
