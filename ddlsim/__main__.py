"""`python -m ddlsim` is the command `ddlsim`."""

from ddlsim.cli import main

main()
