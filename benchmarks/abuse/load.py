"""Many clients on one service while it plans: how long answers take.

    python -m benchmarks.abuse.load [--clients 200] [--seconds 60] [--plans 4] [--postgres URL]

Starts the real service on a new database, asks a few things unloaded, then lets the clients ask for
what people and scripts ask (reads, estimates, small plans), each about once a second, first alone
and then while searches of a 671B model run. Prints answers a second, statuses and percentiles by
kind. Exits 1 for any answer but success or 429, or where a limit below is not held on 2 cores.
"""

import argparse
import asyncio
import collections
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.served import LONG_JOB, Served, served

ESTIMATE: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"seq_len": 8192, "global_batch_size": 128},
    "layout": {"dp_shard": 64},
}
PLAN: dict[str, Any] = {
    "model": "llama3.1-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 256},
    "training": {"seq_len": 8192, "global_batch_size": 512},
}
LIMITS = {  # seconds: percentile 95 of these unloaded, 99 of reads under load
    "estimate": 0.05,
    "plan for 256 GPUs": 1.0,
    "read": 0.2,
}
SHARES = {"read": 0.6, "ready": 0.1, "list": 0.1, "estimate": 0.19, "plan": 0.01}


@dataclass
class Counted:
    """Seconds of answers by kind, and how many of each status."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)

    def note(self, kind: str, status: str, seconds: float) -> None:
        """One answer."""
        self.statuses[status] += 1
        self.seconds[kind].append(seconds)

    def percentile(self, kind: str, percent: float) -> float:
        """Seconds within which so many per cent of a kind's answers came."""
        return float(np.percentile(self.seconds[kind], percent))

    def table(self) -> str:
        """A line a kind."""
        lines = [f"{'':<20}{'answers':>8}{'p50':>9}{'p95':>9}{'p99':>9}{'longest':>9}"]
        for kind, seconds in sorted(self.seconds.items()):
            parts = [*(self.percentile(kind, percent) for percent in (50, 95, 99)), max(seconds)]
            shown = "".join(f"{1000 * part:>6,.0f} ms" for part in parts)
            lines.append(f"{kind:<20}{len(seconds):>8,}{shown}")
        return "\n".join(lines)


async def ask(client: aiohttp.ClientSession, counted: Counted, kind: str, asked: Any) -> bytes:
    """Sends one request and notes how it went; what was answered."""
    started = time.perf_counter()
    method, path, body = asked
    async with client.request(method, path, json=body) as answer:
        found = await answer.read()
    counted.note(kind, str(answer.status), time.perf_counter() - started)
    return found


async def one_client(
    client: aiohttp.ClientSession, counted: Counted, plan_id: str, until: float, seed: int
) -> None:
    """A person or a script: asks, thinks, asks again."""
    chance = random.Random(seed)
    await asyncio.sleep(chance.random())
    while time.perf_counter() < until:
        kind = chance.choices(list(SHARES), list(SHARES.values()))[0]
        gpus = 2 ** chance.randint(3, 7)
        asked = {
            "read": ("GET", f"/plans/{plan_id}/explain", None),
            "ready": ("GET", "/readyz", None),
            "list": ("GET", "/plans?limit=20", None),
            "estimate": ("POST", "/estimate", ESTIMATE),
            "plan": (
                "POST", "/plan",
                {**PLAN, "model": "llama3-8b", "cluster": {**PLAN["cluster"], "num_gpus": gpus}},
            ),
        }[kind]  # fmt: skip
        try:
            await ask(client, counted, kind, asked)
        except aiohttp.ClientError as error:
            counted.note(kind, type(error).__name__, 0.0)
        await asyncio.sleep(chance.expovariate(1.0))


async def long_plans(client: aiohttp.ClientSession, counted: Counted, number: int) -> None:
    """Searches of many seconds at once, each of another batch so that none is known."""

    async def one(index: int) -> None:
        training = {**LONG_JOB["training"], "global_batch_size": 15360 - 1024 * index}
        job = {**LONG_JOB, "training": training}
        await ask(client, counted, "plan of 671B", ("POST", "/plan", job))

    await asyncio.gather(*(one(index) for index in range(number)))


async def unloaded(client: aiohttp.ClientSession) -> Counted:
    """One question after the other."""
    counted = Counted()
    for index in range(40):
        job = {
            **ESTIMATE,
            "training": {**ESTIMATE["training"], "global_batch_size": 64 + 64 * index},
        }
        await ask(client, counted, "estimate", ("POST", "/estimate", job))
    for index in range(20):
        job = {**PLAN, "training": {**PLAN["training"], "global_batch_size": 256 * (index + 1)}}
        await ask(client, counted, "plan for 256 GPUs", ("POST", "/plan", job))
        await ask(client, counted, "same plan again", ("POST", "/plan", job))
    return counted


async def loaded(
    client: aiohttp.ClientSession, arguments: argparse.Namespace, plans: int
) -> Counted:
    """All clients at once, for the whole time."""
    counted = Counted()
    plan_id = json.loads(await ask(client, Counted(), "plan", ("POST", "/plan", PLAN)))["id"]
    until = time.perf_counter() + arguments.seconds
    clients = [
        one_client(client, counted, plan_id, until, seed) for seed in range(arguments.clients)
    ]
    await asyncio.gather(*clients, long_plans(client, counted, plans))
    return counted


async def measure(service: Served, arguments: argparse.Namespace) -> bool:
    """Prints everything; whether every limit holds."""
    # of a light client: a heavy one would keep a core busy itself, and wait for that
    connector = aiohttp.TCPConnector(limit=arguments.clients + 20)
    limit = aiohttp.ClientTimeout(total=600)
    sound = True
    async with aiohttp.ClientSession(service.url, timeout=limit, connector=connector) as client:
        alone = await unloaded(client)
        print(f"\none after the other\n{alone.table()}")
        for kind in ("estimate", "plan for 256 GPUs"):
            sound &= held(alone, kind, 95, LIMITS[kind])
        for plans in (0, arguments.plans):
            counted = await loaded(client, arguments, plans)
            rate = sum(map(len, counted.seconds.values())) / arguments.seconds
            beside = f", beside {plans} plans of a 671B model" if plans else ""
            print(f"\n{arguments.clients} clients{beside}: {rate:,.0f} answers a second")
            print(f"{counted.table()}\nstatuses {dict(counted.statuses)}")
            sound &= set(counted.statuses) <= {"200", "429"}
            for kind in ("read", "ready", "list"):
                sound &= held(counted, kind, 99, LIMITS["read"])
    return sound


def held(counted: Counted, kind: str, percent: float, limit: float) -> bool:
    """Whether a percentile is within its limit; says so where it is not."""
    found = counted.percentile(kind, percent)
    if found > limit:
        print(f"NOT HELD: {kind} p{percent} is {1000 * found:,.0f} ms, limit {1000 * limit:,.0f}")
    return found <= limit


def main() -> int:
    """Runs it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--plans", type=int, default=4)
    parser.add_argument("--postgres", metavar="URL", help="instead of a new SQLite file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.postgres or f"sqlite:///{folder}/planner.db"
        with served(url, Path(folder), log_level="warning") as service:
            return 0 if asyncio.run(measure(service, arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
