"""A program of its own: runs a command that ends with whoever started it, however that one ended.

``python watched.py COMMAND…``. The other end of its standard input is the life line: when it closes, also by a kill,
the command and all it has started get SIGTERM, and SIGKILL twenty seconds later.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

_POLL_S = 0.2
_GRACE_S = 20


def main() -> int:
    """The exit code of the command."""
    # A session of its own: an engine's server starts processes that have to go with it.
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not select.select([sys.stdin], [], [], _POLL_S)[0]:
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
