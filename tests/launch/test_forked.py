"""Forked processes: what their end tells, who ends them, and what no signal ends. None of it needs torch.

They are those of a script that imports a neighbour, as the scripts in benchmarks/ do.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, os, pathlib, signal, sys, time
from sibling import SLEEP_S
from tightfit.launch.forked import Forked, start_server

def wait(rank, folder, *codes):
    # until asked to stop, which it tells; or ends as it was told to
    folder = pathlib.Path(folder)
    def stop(number, frame):
        (folder / f"asked-{rank}").write_text(str(number))
        sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    (folder / f"pids-{rank}.part").write_text(f"{os.getpid()} {os.getppid()}")
    (folder / f"pids-{rank}.part").rename(folder / f"pids-{rank}")
    while not all((folder / f"pids-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    if codes and codes[rank] < 0:
        os.kill(os.getpid(), -codes[rank])
    if codes and codes[rank] > 0:
        sys.exit(codes[rank])
    time.sleep(SLEEP_S)

def main(folder, *codes):
    with Forked(2, wait, (folder, *map(int, codes)), ["json"]) as processes:
        (pathlib.Path(folder) / "begun").touch()
        while processes.wait() and not processes.failures:
            pass
        print(processes.failures, "torch" in sys.modules)

def another():
    # somebody else's process of the same server, asked to stop
    start_server([])
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(SLEEP_S,))
    process.start()
    process.terminate()
    process.join(30)
    print(process.exitcode)
    process.kill()

if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
"""
BOUND_S = 60


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "sibling.py").write_text("SLEEP_S = 600\n")
    made: list[subprocess.Popen[str]] = []

    def started(*codes: int, function: str = "main") -> subprocess.Popen[str]:
        given = [str(tmp_path), *map(str, codes)] if function == "main" else []
        command = [sys.executable, str(tmp_path / "script.py"), function, *given]
        made.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_ctrl_c)
        )
        return made[-1]

    yield started
    for process in made:
        process.kill()


def heed_ctrl_c() -> None:
    """Which programs in a shell's background do not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended_by_ctrl_c(process: subprocess.Popen[str]) -> bool:
    """Once may not do: Python ignores it in the callbacks of its import locks."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    return process.poll() is not None


def until(condition: Callable[[], object]) -> bool:
    limit = time.monotonic() + BOUND_S
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return bool(condition())


def pids(folder: Path) -> tuple[list[int], int]:
    """Those of the processes, and of the server they were forked from."""
    assert until(lambda: all((folder / f"pids-{rank}").exists() for rank in range(2)))
    found = [[int(word) for word in (folder / f"pids-{rank}").read_text().split()] for rank in range(2)]
    assert found[0][1] == found[1][1]
    return [own for own, _ in found], found[0][1]


def asked(folder: Path) -> list[str]:
    return [(folder / f"asked-{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("code", [3, -signal.SIGKILL])
def test_the_end_of_one_is_told_and_ends_the_other(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, code: int
) -> None:
    told, _ = start(0, code).communicate(timeout=BOUND_S)
    assert told.split("\n")[0] == f"{{1: {code}}} False"
    assert (tmp_path / "asked-0").read_text() == str(int(signal.SIGTERM))


def test_a_signal_to_all_leaves_the_server_and_comes_once(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Ctrl-C, which a terminal sends to the whole group, and SIGTERM to each, as Slurm does."""
    process = start()
    _, server = pids(tmp_path)
    assert until((tmp_path / "begun").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(BOUND_S) != 0
    assert asked(tmp_path) == [str(int(signal.SIGTERM))] * 2, "from who started them, not from the terminal"
    assert until(lambda: not alive(server))


def test_ctrl_c_at_any_instant_of_the_start_leaves_nobody(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Also between the start of the first and of the last, which are then neither waited for nor forgotten."""
    for instant in range(12):
        process = start()
        time.sleep(0.05 + 0.02 * instant)
        assert until(partial(ended_by_ctrl_c, process))
        for found in tmp_path.glob("pids-*[01]"):
            assert until(partial(gone, int(found.read_text().split()[0]))), instant
            found.unlink()


def test_the_server_is_not_ended_by_who_asks_everybody_to_stop(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start()
    ranks, server = pids(tmp_path)
    for pid in (server, *ranks):
        os.kill(pid, signal.SIGTERM)
    told, _ = process.communicate(timeout=BOUND_S)
    assert told == "{} False\n", "exit codes are known, as the server was there to tell"
    assert asked(tmp_path) == [str(int(signal.SIGTERM))] * 2


def test_who_started_them_is_killed_and_nothing_stays(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start()
    ranks, server = pids(tmp_path)
    process.kill()
    process.wait(BOUND_S)
    assert until(lambda: not any(alive(pid) for pid in (*ranks, server)))
    assert asked(tmp_path) == [str(int(signal.SIGTERM))] * 2


def test_others_of_the_same_server_can_be_asked_to_stop(start: Callable[..., subprocess.Popen[str]]) -> None:
    told, _ = start(function="another").communicate(timeout=BOUND_S)
    assert told == f"{-signal.SIGTERM}\n"


def gone(pid: int) -> bool:
    return not alive(pid)


def alive(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has asked about after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, before or while it was read
        return False


def tell_of_imports(rank: int, folder: str) -> None:
    Path(folder, "seen").write_text(str("tests.launch.opened" in sys.modules))


@pytest.mark.parametrize(("has_gpu", "seen"), [(True, "False"), (False, "True")])
def test_a_server_that_opened_the_gpu_forks_nothing(has_gpu: bool, seen: str, tmp_path: Path) -> None:
    """Where there is one; in a program of its own, as a program has one server."""
    code = f"""
if __name__ == "__main__":
    from tests.launch.test_forked import tell_of_imports
    from tightfit.launch import forked
    forked.GPU_FILES = ({str(tmp_path) if has_gpu else "/nowhere"!r},)
    with forked.Forked(1, tell_of_imports, ({str(tmp_path)!r},), ["tests.launch.opened"]) as process:
        while process.wait():
            pass
        assert not process.wait()  # a process may end between a look and the next
        assert not process.failures
"""
    (tmp_path / "program.py").write_text(code)
    subprocess.run([sys.executable, tmp_path / "program.py"], check=True, timeout=120)
    assert (tmp_path / "seen").read_text() == seen
