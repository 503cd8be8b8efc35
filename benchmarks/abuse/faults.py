"""A clock that jumps, a disk that is full, a receiver that drips: what a soak does to a service."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL_SECONDS = 6.0
# a library that is loaded first and adds the number in a shared file to the time of day
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *shift;
int clock_gettime(clockid_t which, struct timespec *now) {
    int file, failed = syscall(SYS_clock_gettime, which, now);
    if (failed || which != CLOCK_REALTIME) return failed;
    if (!shift && (file = open(getenv("SOAK_CLOCK"), O_RDONLY | O_CLOEXEC)) >= 0)
        shift = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0), close(file);
    now->tv_sec += shift ? *shift : 0;
    return 0;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
    return 0;
}
"""


class Clock:
    """The time of day of processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        source, library, self.file = (folder / name for name in ("clock.c", "clock.so", "clock"))
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        self.file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "SOAK_CLOCK": str(self.file)}

    def jump(self, seconds: int) -> None:
        """Sets how far it goes ahead of ours."""
        with self.file.open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


def receive(listener: socket.socket, stop: threading.Event) -> None:
    """A web service that answers a byte a second, without an end."""
    held: list[socket.socket] = []
    listener.settimeout(0.5)
    while not stop.wait(0.5):
        with suppress(OSError):
            held.append(listener.accept()[0])
        for one in [*held]:
            try:
                one.send(b"H")
            except OSError:
                held.remove(one)
                one.close()


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Makes the folder a disk of its own that can be filled; whether that could be done."""
    options = ["-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(folder)]
    made = os.geteuid() == 0 and subprocess.run(["mount", *options], check=False).returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leaves no room on its disk for a while."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**9):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    time.sleep(FULL_SECONDS)
    ballast.unlink()
