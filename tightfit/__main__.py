"""`python -m tightfit`."""

from tightfit.cli.main import main

main()
