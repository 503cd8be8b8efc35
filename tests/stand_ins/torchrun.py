"""What torchrun does to processes, without torch: starts ranks in sessions of their own, and ends
all when one fails, saying which.

`torchrun.py NODE NODES RANKS_PER_NODE RESULT PROGRAM ARGUMENTS`
"""

import os
import subprocess
import sys
import time


def main() -> int:
    (node, nodes, number), inside = map(int, sys.argv[1:4]), sys.argv[4:]
    first, world = node * number, {"WORLD_SIZE": str(nodes * number), "TORCHELASTIC_RUN_ID": "none"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "planner.probes.inside", *inside],
            env={**os.environ, **world, "RANK": str(first + rank)},
            start_new_session=True,
        )
        for rank in range(number)
    ]
    while True:
        ended = all(process.poll() is not None for process in ranks)
        failed = next((rank for rank, process in enumerate(ranks) if process.poll()), None)
        if failed is not None:
            code, pid = ranks[failed].returncode, ranks[failed].pid
            for process in ranks:
                process.terminate()
            root = f"  rank      : {first + failed} (local_rank: {failed})\n"
            root += f"  exitcode  : {code} (pid: {pid})\n"
            sys.stderr.write(f"Root Cause (first observed failure):\n[0]:\n{root}")
            return 1
        if ended:
            return 0
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
