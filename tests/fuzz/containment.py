"""Running cases where they can do no harm, and seeing what they did.

This is the child's side (`lanes` has the parent's): memory has a limit, the peak of every case is measured, and an
audit hook ends what would start a program or open a connection. What a case may do: succeed, or raise a UserError of
one readable sentence. Everything else is a finding.
"""

import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.materials import Materials
from tests.speed import million_turns_s
from tightfit.errors import UserError

MILLION_TURNS = 350
"""Of a loop in Python: the processor time a case may take. A busy machine may take SLACK times as long."""
SLACK = 6
MOST_BYTES = 2 * 2**30
EXECUTION = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect")
STOPPED = 75
"""Exit code of a child that stopped at the deadline, between two cases."""
Make = Callable[[random.Random, Materials, Path], Callable[[], object]]


def run_in_child(
    kinds: dict[str, Make],
    numbers: Sequence[int],
    *,
    seed: int,
    given: Materials,
    pipe: int,
    deadline: float,
) -> NoReturn:
    """Run the cases one after another and write `[number, what]` of each into the pipe; never returns."""
    code = 0
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + 2 * MOST_BYTES, resource.RLIM_INFINITY))
        executed: list[str] = []
        sys.addaudithook(lambda event, arguments: _audit(event, arguments, executed))
        for number in numbers:
            if time.monotonic() > deadline:
                code = STOPPED
                break
            what = _case(kinds, number, seed, given, executed)
            os.write(pipe, json.dumps([number, what]).encode() + b"\n")
    finally:
        os._exit(code)


def _audit(event: str, arguments: tuple[Any, ...], executed: list[str]) -> None:
    if event in EXECUTION and "nvidia-smi" not in str(arguments):  # which is how a machine called `local` is looked at
        executed.append(f"{event} {arguments!r:.200}")
        raise PermissionError(f"a case tried {event}")


def _case(kinds: dict[str, Make], number: int, seed: int, given: Materials, executed: list[str]) -> str:
    """What is wrong with case `number`; nothing, as a rule."""
    kind = list(kinds)[number % len(kinds)]
    executed.clear()
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=given.folder))
    try:
        before = _start_measuring()
        began = time.process_time()
        what = _outcome(lambda: kinds[kind](random.Random(f"{seed} {number}"), given, folder)())
        seconds, grown = time.process_time() - began, _memory("VmHWM") - before
        if seconds > MILLION_TURNS * million_turns_s():
            what = what or f"takes {seconds:.0f} s"
        if grown > MOST_BYTES:
            what = what or f"takes {grown / 2**30:.1f} GiB"
        if executed:
            what = f"executes {executed}"
        return what
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return _unreadable(str(error))
    except BaseException as error:
        return "".join(traceback.format_exception(error, limit=-6))
    return ""


def _unreadable(sentence: str) -> str:
    """What is wrong with the sentence of an error."""
    if not sentence or "\n" in sentence or len(sentence) > 8000:
        return f"is refused with no sentence: {sentence[:500]!r}"
    if not sentence.isprintable() and any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in sentence):
        return f"is refused with control characters: {sentence[:500]!r}"
    return ""


def _start_measuring() -> int:
    """Set the peak of resident memory back to what there is, which is returned."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found: Any = next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found) * 1024
