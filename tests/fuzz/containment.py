"""Running cases where they can do no harm, and seeing what they did.

A child process takes cases one after another; before each it says which. Its parent waits: a child that says nothing
for too long is killed, one that dies is noted, and another takes over behind the case. In the child, memory has a
limit, the peak of every case is measured, and an audit hook ends what would start a program or open a connection.
What a case may do: succeed, or raise a UserError of one readable sentence. Everything else is a finding.
"""

import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.materials import Materials
from tightfit.errors import UserError

SECONDS = 20.0
"""Of processor time; a busy machine may take SLACK times as long."""
SLACK = 6
MOST_BYTES = 2 * 2**30
EXECUTION = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect")
Make = Callable[[random.Random, Materials, Path], Callable[[], object]]


@dataclass(frozen=True)
class Finding:
    """A case that did something else than succeed or refuse."""

    number: int
    kind: str
    what: str


def run_cases(kinds: dict[str, Make], numbers: Sequence[int], seed: int, given: Materials) -> Iterator[Finding]:
    """Run the cases of these numbers, which take the kinds in turn; findings come as they are made."""
    waiting, names = list(numbers), list(kinds)
    while waiting:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _child(kinds, waiting, seed, given, write)
        os.close(write)
        for number, what in _watched(child, read, list(waiting)):
            waiting.remove(number)
            if what:
                yield Finding(number, names[number % len(names)], what)


def _watched(child: int, pipe: int, waiting: list[int]) -> Iterator[tuple[int, str]]:
    """Each case the child is through with, and what is wrong with it; last the one that ended the child, if one did."""
    rest = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], SECONDS * SLACK)
        block = os.read(pipe, 65536) if ready else b""
        *lines, rest = (rest + block).split(b"\n")
        for number, what in map(json.loads, lines):
            waiting.remove(number)
            yield number, what
        if block:
            continue
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.close(pipe)
        status = os.waitpid(child, 0)[1]
        if waiting:
            yield waiting[0], "hangs" if not ready else f"ends the process ({os.waitstatus_to_exitcode(status)})"
        return


def _child(kinds: dict[str, Make], numbers: Sequence[int], seed: int, given: Materials, pipe: int) -> None:
    """Never returns."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + 2 * MOST_BYTES, resource.RLIM_INFINITY))
        executed: list[str] = []
        sys.addaudithook(lambda event, arguments: _audit(event, arguments, executed))
        for number in numbers:
            what = _case(kinds, number, seed, given, executed)
            os.write(pipe, json.dumps([number, what]).encode() + b"\n")
    finally:
        os._exit(0)


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
        if seconds > SECONDS:
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
