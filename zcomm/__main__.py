"""`python -m zcomm` is the command `zcomm`."""

import sys

from zcomm.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
