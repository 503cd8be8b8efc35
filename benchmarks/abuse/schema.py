"""Requests made from the OpenAPI document, well-formed and not, against the real service.

    python -m benchmarks.abuse.schema [--examples 50] [--seed 1] [--postgres URL]

Starts the service with keys on a new database and lets schemathesis ask every operation: examples,
boundary values, generated ones, and sequences in which one answer is the next request. It fails for
any answer that the document does not announce (5xx, another schema, media type or header), for one
without a key, and for malformed requests that are accepted. That a well-formed job may still be
refused is left out: JSON Schema cannot say which numbers go together.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.served import served

ROOT = Path(__file__).parents[2]
KEY = "schemathesis"
# the service's own limit comes first: a plan on a busy machine is no failure
PATIENCE_SECONDS = 600
# DELETE of a plan, probe or sweep cancels what runs of it; what was answered stays to be read.
STAYS = """
[[operations]]
include-path-regex = "^/(plans|probes|sweeps)/"
checks.use_after_free.enabled = false
"""


def main() -> int:
    """Runs it; schemathesis' exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--examples", type=int, default=50, help="of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    parser.add_argument("--postgres", metavar="URL", help="instead of a new SQLite file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "api_keys": f"tester:admin:{hashlib.sha256(KEY.encode()).hexdigest()}",
            "requests_per_second": 100_000,
            "probe_workers": 0,  # what is queued stays so: nothing is measured
            "task_workers": 0,
            "log_level": "warning",
        }
        url = arguments.postgres or f"sqlite:///{folder}/planner.db"
        with served(url, Path(folder), **settings) as service:
            config = Path(folder, "schemathesis.toml")
            config.write_text(STAYS, encoding="utf-8")
            command = [
                str(Path(sys.executable).with_name("schemathesis")),
                f"--config-file={config}",
                "run",
                f"{service.url}/openapi.json",
                f"--header=Authorization: Bearer {KEY}",
                f"--max-examples={arguments.examples}",
                f"--seed={arguments.seed}",
                f"--phases={arguments.phases}",
                "--exclude-checks=positive_data_acceptance",
                f"--request-timeout={PATIENCE_SECONDS}",
                "--no-color",
            ]
            hooks = {"SCHEMATHESIS_HOOKS": "benchmarks.abuse.hooks", "PYTHONPATH": str(ROOT)}
            code = subprocess.run(
                command, cwd=folder, env={**os.environ, **hooks}, check=False
            ).returncode
            if "Traceback" in service.log:
                print(service.log)
                return 1
            return code


if __name__ == "__main__":
    sys.exit(main())
