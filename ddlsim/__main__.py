"""Entry point of ``python -m ddlsim``, the same as the command ``ddlsim``."""

from ddlsim.cli import main

main()
