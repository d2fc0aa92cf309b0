"""`python -m pd_router`."""

import sys

from pd_router.cli import main

if __name__ == "__main__":
    sys.exit(main())
