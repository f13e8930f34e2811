"""`python -m loopwright`."""

from loopwright.cli import main

main()
