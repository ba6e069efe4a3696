"""Reading what clusters already have: measurements, traces, logs, topologies. Start with :func:`read_any`.

Every reader is a function of a path that returns frozen dataclasses, or raises
:class:`~ddlsim.errors.ConfigError` with file, line and reason. Names are loaded when first used.
"""
