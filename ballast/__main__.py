"""`python -m ballast` is `ballast`."""

from ballast.cli import main

main()
