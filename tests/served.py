"""The real service in a process of its own, for tests that no test client can stand in for."""

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi.testclient import TestClient

from planner.api.http.app import create_app
from planner.api.settings import Settings
from planner.api.wiring import Wiring
from tests.conftest import PLANNER, clean_environment, job_values, ran

# searches of many seconds, one size after another: what is asked while others want answers
LONG_JOB = job_values("deepseek-v3", "h800-sxm-80gb", "256..16384", 4096, 15360)


@dataclass(frozen=True)
class Served:
    """A running service. log: where it writes."""

    url: str
    port: int
    process: "subprocess.Popen[bytes]"
    log_file: Path
    connections: contextlib.ExitStack

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def connect(self) -> socket.socket:
        """A connection that has said nothing yet."""
        address = ("127.0.0.1", self.port)
        return self.connections.enter_context(socket.create_connection(address, timeout=60))

    def planning(self) -> set[int]:
        """Processes that it started to plan."""
        found = ran("pgrep", "-f", "spawn_main", "-P", self.process.pid).stdout
        return {int(line) for line in found.split()}


@contextlib.contextmanager
def in_process(database_url: str, **settings: Any) -> Iterator[TestClient]:
    """The service within the tests' own process, until the end of the block."""
    chosen = Settings(database_url=database_url, **settings)
    with TestClient(create_app(chosen), raise_server_exceptions=False) as client:
        yield client


def events_of(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event of a stream, without what only keeps it alive."""
    blocks = [block for block in stream.strip().split("\n\n") if not block.startswith(":")]
    fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(one["event"], json.loads(one["data"])) for one in fields]


def wiring_of(client: TestClient) -> Wiring:
    return client.app.state.wiring  # type: ignore[attr-defined]


@contextlib.contextmanager
def served(database_url: str, folder: Path, **settings: object) -> Iterator[Served]:
    """The service until the end of the block. settings: PLANNER_ variables in lower case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chosen = {"database_url": database_url, "probe_folder": folder / "probes", **settings}
    log_file = folder / f"service-{port}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*PLANNER, "serve", "--port", str(port)],
            env={
                **clean_environment(),
                **{f"PLANNER_{name.upper()}": str(value) for name, value in chosen.items()},
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client() as client:  # to make one takes 20 ms
            for _ in range(6000):
                try:
                    client.get(f"{url}/healthz", timeout=60).raise_for_status()
                    break
                except httpx.TransportError:
                    assert process.poll() is None, log_file.read_text()
                    time.sleep(0.05)
        with contextlib.ExitStack() as connections:
            yield Served(url, port, process, log_file, connections)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
