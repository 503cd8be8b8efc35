"""Units and the compose file that the pages show: they parse, and give no more than is needed."""

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.api.settings import Settings
from tests.conftest import ROOT, needed_program, ran

PAGES = ROOT / "docs" / "how-to"
PAGE = "run-in-containers.md"
UNITS = {
    "planner.service": "run-the-service.md", "planner-worker.service": "run-the-service.md",
    "planner-slurm.service": "probe-on-slurm.md",
}  # fmt: skip
SYSTEM = ("planner.service", "planner-worker.service")


def shown(page: str, title: str) -> str:
    """The file of this title that a page shows."""
    text = (PAGES / page).read_text()
    found = re.search(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', text, re.M | re.S)
    assert found is not None, f"{page} shows no {title}"
    return found[1]


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit's section Service; one may stand there several times."""
    found: dict[str, list[str]] = {}
    section = shown(UNITS[name], name).partition("[Service]\n")[2].partition("\n[")[0]
    for line in filter(None, section.splitlines()):
        key, _, value = line.partition("=")
        found.setdefault(key, []).append(value)
    return found


SETTINGS = {f"PLANNER_{field.upper()}" for field in Settings.model_fields}


@pytest.mark.parametrize("name", SYSTEM)
def test_a_unit_gives_no_more_than_is_needed(name: str) -> None:
    rights = {
        "User": ["planner"], "NoNewPrivileges": ["yes"], "ProtectSystem": ["strict"],
        "ProtectHome": ["yes"], "CapabilityBoundingSet": [""], "UMask": ["0077"],
    }  # fmt: skip
    service = unit(name)
    assert {key: service.get(key) for key in rights} == rights
    assert "PrivateNetwork" not in service, "leases on GPUs are names of the host's network"


@pytest.mark.parametrize("name", sorted(UNITS))
def test_a_unit_names_settings_that_there_are(name: str) -> None:
    pairs = [pair for value in unit(name)["Environment"] for pair in value.split()]
    assert {pair.partition("=")[0] for pair in pairs} <= SETTINGS
    parser = configparser.ConfigParser()
    parser.read_string("[all]\n" + shown("run-the-service.md", "environment"))
    assert {key.upper() for key in parser["all"]} <= SETTINGS


@pytest.mark.parametrize("name", sorted(UNITS))
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    text = shown(UNITS[name], name)
    assert set(re.findall(r"^\[(\w+)\]$", text, re.M)) == {"Unit", "Service", "Install"}
    needed_program("systemd-analyze", "systemd")
    file = tmp_path / name
    file.write_text(re.sub(r"(?<==)/\S+/planner-cli", "/bin/true", text))
    said = ran("systemd-analyze", "verify", "--man=no", file).stderr
    assert [line for line in said.splitlines() if name in line] == []


IMAGES = (ROOT / "Dockerfile").read_text()


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load(shown(PAGE, "compose.yaml"))


def test_the_compose_file_has_its_parts_and_no_rights(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"database", "migration", "service", "worker"}
    none = {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "read_only": True}
    for name in ("migration", "service", "worker"):
        one = services[name]
        assert one.items() >= none.items()
        assert "user" not in one, "the image's own user is not root"
        assert one["environment"]["PLANNER_DATABASE_URL"].startswith("postgresql+psycopg://")
    assert "/healthz" in services["service"]["healthcheck"]["test"][-1]
    assert services["worker"]["init"] is True
    assert services["service"]["ports"] == ["127.0.0.1:8000:8000"]
    for one in services.values():
        assert "build" not in one or f" AS {one['build']['target']}\n" in IMAGES
    assert re.findall(r"^USER (\w+)$", IMAGES, re.M)[-1] == "planner"


def test_it_waits_for_what_it_needs_and_names_settings_that_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["migration"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    done = {"migration": {"condition": "service_completed_successfully"}}
    assert services["service"]["depends_on"] == services["worker"]["depends_on"] == done
    for name in ("migration", "service", "worker"):
        assert set(services[name]["environment"]) - {"TRITON_CACHE_DIR"} <= SETTINGS
    assert "healthcheck" in services["database"]
    secrets = set(re.findall(r"\$\{(\w+)([^}]*)\}", shown(PAGE, "compose.yaml")))
    required = {("DATABASE_PASSWORD", ":?"), ("PLANNER_API_KEYS", ":?")}
    assert secrets == required, "compose refuses to start without them"


def test_a_worker_can_compile_and_its_gpus_share_memory(compose: dict[str, Any]) -> None:
    """Docker mounts a tmpfs noexec, gives /dev/shm 64 MB, and locks 64 KiB of memory."""
    worker = compose["services"]["worker"]
    (mount,) = worker["tmpfs"]
    folder, _, options = mount.partition(":")
    assert "exec" in options.split(",")
    assert worker["environment"]["TRITON_CACHE_DIR"].startswith(f"{folder}/")
    assert worker["environment"].items() >= compose["x-planner"]["environment"].items()
    assert (worker["shm_size"], worker["ulimits"]) == ("1gb", {"memlock": -1})
    commands = re.findall(r"docker run [^$]*--gpus all[^$]*", (PAGES / PAGE).read_text())
    assert len(commands) == 2
    assert all("--shm-size 1g --ulimit memlock=-1" in command for command in commands)
    torch = IMAGES.partition(" AS with-torch\n")[2].partition("\nFROM ")[0]
    assert re.search(r"apt-get install .*\bgcc g\+\+ libc6-dev\b", torch)
    assert IMAGES.count("FROM with-torch AS ") == 2
