"""A process that has loaded the program once and forks a child for each command line, so that a kill costs no start-up.

Protocol: a JSON list of words a line in; the child's process id out, and its wait status when it has ended.
"""

import json
import os
import sys


def main() -> None:
    import wsi_mil.stages.demo  # noqa: F401
    from apps.cli import main as command

    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            silence = os.open(os.devnull, os.O_RDWR)
            os.dup2(silence, 0)
            os.dup2(silence, 1)
            os._exit(command(json.loads(line)))
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
