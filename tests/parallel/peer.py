"""A rank in a process of its own, for tests that kill or stop one; run as a script.

Usage: peer.py STORE_FILE RANK WORLD_SIZE TIMEOUT. It agrees on steps until something goes wrong and
prints what happened, one word and a number of seconds per line.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from moeserve.parallel.agreement import Agreement
from moeserve.parallel.groups import ParallelGroups, file_store


def main() -> None:
    """Steps forever; on an error tells how long the step took, closes, tells how long that took."""
    path, rank, world_size, timeout = sys.argv[1:]
    store = file_store(Path(path), int(world_size))
    groups = ParallelGroups.create(int(rank), int(world_size), store, float(timeout))
    agreement = Agreement(groups)
    print("ready", flush=True)
    try:
        while True:
            started = time.monotonic()
            agreement.exchange(1, has_work=True, stop=False)
            time.sleep(0.005)
    except RuntimeError as error:
        print(f"error {time.monotonic() - started:.3f} {error}".replace("\n", " "), flush=True)
    started = time.monotonic()
    groups.close()
    print(f"closed {time.monotonic() - started:.3f}", flush=True)


if __name__ == "__main__":
    main()
