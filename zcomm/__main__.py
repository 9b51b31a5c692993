"""The command `zcomm`, also as `python -m zcomm`."""

import signal
import sys


def run() -> int:
    """Run the command; returns the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported: an end without a traceback
    from zcomm.tools.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
