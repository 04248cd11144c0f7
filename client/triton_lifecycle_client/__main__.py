"""Where the command `lifecycle` begins: nothing is imported before Ctrl-C has a clean end."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    # Not KeyboardInterrupt, which imports may swallow or turn into another error; and there is nothing to clean up yet.
    # Left alone where the caller had it ignored (`nohup`, a shell's background job).
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if ours:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        from .cli import main as run  # noqa: PLC0415

        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
