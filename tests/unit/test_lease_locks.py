"""Locks on devices between users: nothing that another user put there is opened or believed."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import ProbeError
from planner.probes import guardian
from planner.probes.folder import lease_folder
from planner.probes.guardian import TOKEN
from planner.probes.pools.leases import LeaseLocks
from tests.conftest import clean_environment

OTHER_USER = 65534  # nobody
GPU = "gpu-GPU-0"
AS_ROOT = os.geteuid() == 0
USERS = [os.geteuid(), OTHER_USER] if AS_ROOT else [os.geteuid()]


def locks(folder: Path, machine: Path) -> LeaseLocks:
    return LeaseLocks(folder, machine=str(machine))


def is_refused(held: LeaseLocks, words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        held.lock(GPU)


def is_free(held: LeaseLocks) -> None:
    """Whether it can be locked; it is released again."""
    assert held.lock(GPU)
    held.release()


@pytest.fixture
def leases(place: Path) -> Path:
    """A folder that is ours alone."""
    folder = place / "leases"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(params=USERS)
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of who runs the test: we, and where we are root also a user without its rights."""
    user = request.param
    with tempfile.TemporaryDirectory(prefix="planner-test-") as name:
        if user == os.geteuid():
            yield Path(name)
            return
        os.chown(name, user, user)
        groups = os.getgroups()
        os.setgroups([])
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
        yield Path(name)
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user that carries a token."""
    environment = {**clean_environment(), TOKEN: "copied"}
    process = subprocess.Popen(["sleep", "60"], env=environment, user=OTHER_USER)
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def planted(folder: Path) -> None:
    """A lock file that names the bystander's token."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / f"{GPU}.lock").write_text(json.dumps({"token": "copied"}))


def test_a_device_is_locked_once_and_free_again(place: Path) -> None:
    first, second = locks(place / "a", place), locks(place / "a", place)
    assert (first.lock(GPU), second.lock(GPU)) == (True, False)
    assert (len(first), len(second)) == (1, 0)
    first.release()
    is_free(second)


def test_users_with_folders_of_their_own_exclude_each_other_on_gpus(place: Path) -> None:
    mine, theirs = locks(place / "mine", place), locks(place / "theirs", place)
    assert (mine.lock(GPU), theirs.lock(GPU), theirs.lock("gpu-GPU-1")) == (True, False, True)
    mine.release()
    is_free(theirs)


def test_a_process_that_inherits_the_lock_keeps_it(place: Path) -> None:
    """As the guardian does, when its runner dies."""
    mine, other = locks(place / "a", place), locks(place / "b", place)
    assert mine.lock(GPU)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=mine.descriptors)
    mine.release()
    assert not other.lock(GPU)
    heir.kill()
    heir.wait()
    is_free(other)


@pytest.mark.skipif(not AS_ROOT, reason="only root may become another user")
def test_another_users_process_is_waited_for(tmp_path: Path) -> None:
    theirs = Path(tempfile.gettempdir()) / f"planner-test-{os.getpid()}"
    said, order = os.pipe(), os.pipe()
    process = os.fork()  # another user may not read this Python's files
    if process == 0:
        os.setuid(OTHER_USER)
        held = locks(theirs, tmp_path)
        os.write(said[1], b"locked" if held.lock(GPU) else b"failed")
        os.close(order[1])
        os.read(order[0], 1)
        os._exit(0)
    assert os.read(said[0], 6) == b"locked"
    mine = locks(tmp_path / "mine", tmp_path)
    assert not mine.lock(GPU)
    is_refused(locks(theirs, tmp_path / "elsewhere"), "belongs to another user")
    os.close(order[1])
    os.waitpid(process, 0)
    is_free(mine)
    for descriptor in (*said, order[0]):
        os.close(descriptor)
    shutil.rmtree(theirs)


@pytest.mark.parametrize("hard", [False, True])
def test_a_link_to_our_file_is_refused_and_it_stays(place: Path, leases: Path, hard: bool) -> None:
    victim, link = place / "precious", leases / f"{GPU}.lock"
    victim.write_text("kept")
    link.hardlink_to(victim) if hard else link.symlink_to(victim)
    is_refused(locks(leases, place), "PLANNER_LEASE_FOLDER")
    assert victim.read_text() == "kept"
    link.unlink()
    is_free(locks(leases, place))  # what was refused holds no lock


def test_what_is_no_file_is_refused_at_once(place: Path, leases: Path) -> None:
    os.mkfifo(leases / f"{GPU}.lock")
    is_refused(locks(leases, place), "not a file of ours alone")


def test_a_folder_that_others_may_write_is_refused(place: Path, leases: Path) -> None:
    (place / "link").symlink_to(leases)
    is_refused(locks(place / "link", place), "is a link or a file")
    leases.chmod(0o1777)
    is_refused(locks(leases, place), "open to others")


@pytest.mark.skipif(not AS_ROOT, reason="only root may give a file to another user")
def test_tokens_of_others_kill_nobody(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    folder = tmp_path / "leases"
    planted(folder)
    os.chown(folder / f"{GPU}.lock", OTHER_USER, OTHER_USER)
    is_refused(locks(folder, tmp_path), "not a file of ours alone")
    assert bystander.poll() is None


@pytest.mark.skipif(not AS_ROOT, reason="only root could kill another user's process")
def test_another_users_process_is_none_of_ours_whatever_it_carries(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / "leases"
    planted(folder)
    is_free(locks(folder, tmp_path))
    assert bystander.poll() is None
    assert guardian.bearers("copied") == set()


def test_leases_are_in_the_folder_of_the_session_or_of_the_user(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    assert lease_folder() == place / "planner-leases"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "gone"))
    assert lease_folder().name == f"planner-leases-{os.getuid()}"
