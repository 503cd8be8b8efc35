"""Settings from the environment: `PLANNER_` and the name of the field, in capitals."""

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_dir, user_data_dir
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from planner.api.logs import LogFormat, LogLevel
from planner.errors import Fault, SpecError, fault
from planner.probes.folder import lease_folder
from planner.units import DAY, MEGA

SCOPES = frozenset({"read", "plan", "probe", "admin"})
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_NUMBER = re.compile(r"^[0-9]{1,12}$")
_SEVERAL = ", several separated by commas"
_QUOTA_EXAMPLE = "write name:plans_per_day=100+queued_probes=5+gpu_seconds_per_day=3600" + _SEVERAL
_KEY_EXAMPLE = "write name:read+plan:SHA256-OF-THE-SECRET" + _SEVERAL


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. Only the SHA-256 of the secret is known here. `admin` includes every scope."""

    name: str
    scopes: frozenset[str]
    secret_sha256: str

    def may(self, scope: str) -> bool:
        """Whether the key's scopes allow what needs `scope`."""
        return scope in self.scopes or "admin" in self.scopes


def parse_api_keys(text: str) -> tuple[ApiKey, ...]:
    """Keys from "name:scope+scope:sha256,...".

    Raises SpecError, whose message never shows the text, which may hold secrets.
    """
    keys = [_parse_key(item) for item in _listed(text)]
    if len({key.name for key in keys}) < len(keys):
        raise _wrong_key("two keys have the same name", "give each its own name")
    return tuple(keys)


def _listed(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _parse_key(item: str) -> ApiKey:
    parts = item.split(":")
    if len(parts) != 3 or not parts[0] or not _SHA256.match(parts[2].lower()):
        raise _wrong_key("a key is not of the form name:scopes:sha256", _KEY_EXAMPLE)
    scopes = frozenset(parts[1].split("+"))
    if not scopes <= SCOPES:
        remedy = f"scopes: {', '.join(sorted(SCOPES))}"
        raise _wrong_key(f"key {parts[0]} has an unknown scope", remedy)
    return ApiKey(parts[0], scopes, parts[2].lower())


def _wrong_key(rule: str, remedy: str) -> SpecError:
    return fault("PLANNER_API_KEYS", "***", rule, remedy)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key.

    plans_per_day: plans, with probes or without.
    queued_probes: at once.
    gpu_seconds_per_day: used by its probes, and promised to what is open.
    """

    plans_per_day: int
    queued_probes: int
    gpu_seconds_per_day: float


def parse_quotas(text: str, default: Quota) -> dict[str, Quota]:
    """Quotas by key, from "name:plans_per_day=100+queued_probes=5,...". Raises SpecError.

    default: quota that fills in the limits that the text leaves out.
    """
    found = {}
    for item in _listed(text):
        name, _, limits = item.partition(":")
        values: dict[str, float] = {}
        for limit in limits.split("+"):
            what, _, number = limit.partition("=")
            if what not in Quota.__dataclass_fields__ or not _NUMBER.match(number):
                rule = f"{limit or 'nothing'} is no quota"
                raise fault("PLANNER_QUOTAS", item, rule, _QUOTA_EXAMPLE)
            values[what] = float(number) if what.startswith("gpu_seconds") else int(number)
        if not name or name in found:
            raise fault("PLANNER_QUOTAS", item, "names no key, or one twice", _QUOTA_EXAMPLE)
        found[name] = replace(default, **values)  # type: ignore[arg-type]
    return found


def default_database_url() -> str:
    """SQLite in the user's data folder."""
    return f"sqlite:///{Path(user_data_dir('planner', appauthor=False)) / 'planner.db'}"


def default_probe_folder() -> Path:
    """A folder in the user's cache."""
    return Path(user_cache_dir("planner", appauthor=False)) / "probes"


def default_processes() -> int:
    """One a core, four at most: a search of a large model needs half a gigabyte."""
    return min(4, os.cpu_count() or 1)


class Settings(BaseSettings):
    """Settings of an operator.

    database_url: SQLAlchemy URL of SQLite or PostgreSQL.
    database_timeout_seconds: for a statement, a lock or a free connection; then 503, to be tried
        again.
    database_connections: of one process, at most.
    api_keys: `name:scope+scope:SHA-256 of the secret`, several at commas; empty: no keys are asked
        for, and only loopback addresses are served.
    plans_per_day: that one key may ask for.
    queued_probes: that one key may have waiting at once.
    gpu_seconds_per_day: that the probes of one key may use.
    quotas: other limits of some keys, `name:plans_per_day=100+queued_probes=5`, several at commas.
    host, port: where the service listens.
    allowed_hosts: names by which the service is asked, several at commas. Empty: any name where
        keys are needed, else names that no public DNS holds.
    proxies: addresses and networks of proxies, several at commas. X-Forwarded-For and
        X-Forwarded-Proto are believed from these only.
    max_body_bytes: of one request.
    request_seconds: that a client may take to send the head of a request, and again its body.
    most_connections: at once; more are closed.
    requests_per_second: of one key, over ten seconds.
    log_format: `text`, or `json` for a collector of logs.
    log_level: debug, info, warning or error.
    planning_processes: plans computed at once, each in a process of its own.
    pricing_processes: the same of estimates and simulations.
    planning_seconds: after which either is given up.
    most_waiting_plans, most_waiting_plans_per_key: requests that wait for a process of either kind;
        more are refused for the time being.
    probe_folder: files of running and failed probes; for Slurm a folder that all nodes share.
    lease_folder: tokens of the probes that have this machine's devices; of this user alone.
    probe_workers: probes that the service runs at once; 0 leaves them to other processes on the
        same database.
    task_workers: the same of studies and sweep runs.
    audit_days: for which a line of the audit trail is kept; workers of studies and sweeps delete
        older ones.
    webhook_hosts: hosts that sweeps may post their reports to, `host` or `host:port`, several at
        commas; empty: none.
    webhook_secret: signs what is posted (Standard Webhooks); without one it is not signed.
    probe_python: interpreter that has torch, where it is another than ours.
    probe_program: the reference program, a module or a file.
    probe_tolerated_gib: memory of a GPU that other programs, such as a desktop, may hold while a
        probe runs on it; runs beside them count a quarter of the others.
    slurm_account, slurm_qos, slurm_constraint, slurm_exclude: of every job on a Slurm cluster, as
        sbatch takes them; empty leaves them to Slurm.
    slurm_container_image: that probes run in, by srun's `--container-image` (Pyxis).
    slurm_gpus_by: how Slurm is asked for GPUs, `gpus-per-node` or `gres`.
    slurm_exclusive: a probe on all GPUs of its nodes asks for all their cores and memory too.
    slurm_cpus_per_gpu, slurm_memory_gib_per_gpu: what other probes ask for; unset: Slurm's default.
    slurm_gpus_at_once: that our jobs on a Slurm cluster may take together; unset: as many as it
        gives. With a limit a sweep keeps its jobs from one probe to the next.
    slurm_queue_seconds: that a job may wait for its nodes.
    slurm_restarts: how often a probe runs again that lost its job to another job or with a node.
    probe_environment: names of variables, with `*`, several at commas, that a probe gets besides
        those by which programs find libraries, devices and networks.
    """

    model_config = SettingsConfigDict(env_prefix="PLANNER_", extra="ignore")

    database_url: str = Field(default_factory=default_database_url, min_length=1)
    database_timeout_seconds: float = Field(default=10.0, gt=0, le=3600)
    database_connections: int = Field(default=20, gt=0, le=1000)
    api_keys: SecretStr = SecretStr("")
    plans_per_day: int = Field(default=10_000, ge=0)
    queued_probes: int = Field(default=100, ge=0)
    gpu_seconds_per_day: float = Field(default=8 * DAY, ge=0, allow_inf_nan=False)
    quotas: str = ""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allowed_hosts: str = ""
    proxies: str = ""
    max_body_bytes: int = Field(default=int(2 * MEGA), gt=0)
    request_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    most_connections: int = Field(default=2000, gt=0)
    requests_per_second: int = Field(default=100, gt=0)
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    planning_processes: int = Field(default_factory=default_processes, gt=0, le=256)
    pricing_processes: int = Field(default_factory=default_processes, gt=0, le=256)
    planning_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    most_waiting_plans: int = Field(default=256, ge=0)
    most_waiting_plans_per_key: int = Field(default=64, ge=0)
    probe_folder: Path = Field(default_factory=default_probe_folder)
    lease_folder: Path = Field(default_factory=lease_folder)
    probe_workers: int = Field(default=1, ge=0, le=64)
    task_workers: int = Field(default=1, ge=0, le=16)
    audit_days: int = Field(default=365, gt=0, le=36_500)
    webhook_hosts: str = ""
    webhook_secret: SecretStr = SecretStr("")
    probe_python: str = sys.executable
    probe_program: str = "planner.probes.worker"
    probe_tolerated_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    probe_environment: str = ""
    slurm_account: str = ""
    slurm_qos: str = ""
    slurm_constraint: str = ""
    slurm_exclude: str = ""
    slurm_container_image: str = ""
    slurm_gpus_by: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    slurm_exclusive: bool = True
    slurm_cpus_per_gpu: int | None = Field(default=None, gt=0)
    slurm_memory_gib_per_gpu: int | None = Field(default=None, gt=0)
    slurm_gpus_at_once: int | None = Field(default=None, gt=0)
    slurm_queue_seconds: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    slurm_restarts: int = Field(default=3, ge=0, le=100)

    @cached_property
    def host_names(self) -> frozenset[str]:
        return frozenset(_listed(self.allowed_hosts.lower()))

    @cached_property
    def webhook_places(self) -> frozenset[str]:
        return frozenset(_listed(self.webhook_hosts.lower()))

    @cached_property
    def keys(self) -> tuple[ApiKey, ...]:
        """The parsed keys. Raises SpecError."""
        return parse_api_keys(self.api_keys.get_secret_value())

    @cached_property
    def quotas_by_key(self) -> dict[str, Quota]:
        """The parsed quotas of the keys that have their own. Raises SpecError."""
        return parse_quotas(self.quotas, self.default_quota)

    @property
    def default_quota(self) -> Quota:
        """The quota of every key without one of its own."""
        return Quota(self.plans_per_day, self.queued_probes, self.gpu_seconds_per_day)

    def quota_of(self, key: str) -> Quota:
        return self.quotas_by_key.get(key, self.default_quota)


def load_settings() -> Settings:
    """Settings of this process. Raises SpecError naming the environment variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        remedy, faults = "correct or unset this environment variable", []
        for item in error.errors(include_url=False):
            name = f"PLANNER_{str(item['loc'][0]).upper()}"
            faults.append(Fault(name, item["input"], item["msg"].lower(), remedy))
        raise SpecError(faults) from None
