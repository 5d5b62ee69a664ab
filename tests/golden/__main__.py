"""See `tests.golden.run`: worker processes import functions from there, not from a `__main__`."""

import sys

from tests.golden.run import main

if __name__ == "__main__":
    sys.exit(main())
