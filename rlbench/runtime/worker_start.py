"""What Ray runs in place of its `default_worker.py`: it has the warm process fork the worker, and ends.

A script that imports nothing slow. The first worker of a cluster, a session's monitor, needs little of what the warm
process is still importing then, and becomes Ray's own at once; so does any where that process is gone, and says so.
"""

import json
import os
import socket
import sys
import zlib

SOCKET = "RLBENCH_WARM_SOCKET"
"""The environment variable that holds the address of the warm process."""
RAYS_OWN = "RLBENCH_RAYS_OWN_WORKER"
"""The one that holds the path of Ray's `default_worker.py`."""
JOB_BYTES = 4
"""How long `job` is."""
PATIENCE_S = 40.0  # for its imports: Ray gives a worker that does not register up after 60


def is_first() -> bool:
    """Whether no other worker of this cluster came before."""
    try:
        os.close(os.open(os.environ[SOCKET] + ".first", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def job() -> bytes:
    """Return a number for what Ray reads from the environment as it is loaded, the job of this worker among it."""
    read = sorted(item for item in os.environ.items() if item[0].startswith("RAY_"))
    return zlib.crc32(json.dumps(read).encode()).to_bytes(JOB_BYTES, "big")


def forked() -> bool:
    """Hand this process's arguments, environment and first three files to the warm process; whether it took them."""
    with socket.socket(socket.AF_UNIX) as warm:
        warm.settimeout(PATIENCE_S)
        try:
            warm.connect(os.environ[SOCKET])
            socket.send_fds(warm, [job()], [0, 1, 2])
            process = {"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
            warm.sendall(json.dumps(process).encode())
            warm.shutdown(socket.SHUT_WR)
            if not warm.recv(1):
                raise ConnectionAbortedError("it ended before it forked")
            return True
        except OSError as error:
            print(f"rlbench: no warm process ({error}): this worker starts by itself, which takes longer", flush=True)
            return False


if __name__ == "__main__" and (is_first() or not forked()):
    os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *sys.argv[1:]])
