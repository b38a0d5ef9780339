"""Copies of a served model, each a server of its own on the loopback interface, behind one address (balancer.py).

Each copy gets GPUs of its own, where there are any, of those that CUDA_VISIBLE_DEVICES names, if it is set. When a
copy ends, the whole server does, with an error: half a service that looks whole is worse. A signal stops listening,
lets open answers finish, and then ends the copies.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import uvicorn

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.launch.endings import exit_name
from tightfit.serve.http.balancer import Balancer
from tightfit.serve.http.guards import Guards
from tightfit.serve.http.server import PatientServer, ServerOptions, listening_config

OWN = ("--replicas", "--host", "--port")
"""Options that are not passed on to a copy."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1
LOOK_S = 0.2
START_S = 1800.0


def serve_replicas(arguments: Sequence[str], options: ServerOptions, *, replicas: int, cards: int, gpus: int) -> None:
    """Serve copies that are each started with `arguments`, until a signal comes or one of them ends."""
    own_cards = cards_of_copies(replicas, cards) if gpus else None
    if gpus and replicas * cards > gpus:
        raise UserError(
            f"--replicas is {replicas}, each on {counted(cards, 'GPU')}, but there are {gpus} here; lower it"
        )
    ports = _free_ports(replicas)
    with _copies(without_own(arguments), ports, own_cards) as copies:
        _wait_until_healthy(copies, ports)
        server = PatientServer(listening_config(Guards(Balancer(ports), options.limits), options))
        threading.Thread(target=_watch, args=(copies, server), daemon=True).start()
        server.run()
        ended = {index: copy.returncode for index, copy in enumerate(copies) if copy.poll() is not None}
        for copy in copies:
            copy.send_signal(signal.SIGTERM)
        for copy in copies:
            copy.wait(options.drain_seconds + 30)
    if ended:
        index, code = next(iter(ended.items()))
        how = f"copy {index} of the model ended with {exit_name(code)}"
        print(f"tightfit: {how}, and the server with it; start it again", file=sys.stderr)
    if ended or not server.started:
        sys.exit(1)


def without_own(arguments: Sequence[str]) -> list[str]:
    """A command line without the options that only the balancer has."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if not skip and word.partition("=")[0] not in OWN:
            kept.append(word)
        skip = not skip and word in OWN
    return kept


def cards_of_copies(replicas: int, cards: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each copy: its share of the cards that the variable names, or of all."""
    visible = os.environ.get(VISIBLE)
    wanted = replicas * cards
    named = [str(card) for card in range(wanted)] if visible is None else _named_cards(visible)
    if len(named) < wanted:
        raise UserError(
            f"{VISIBLE} is {visible!r}, which names {counted(len(named), 'GPU')}, but --replicas is {replicas}, each "
            f"on {counted(cards, 'GPU')}; name more cards or lower --replicas"
        )
    return [",".join(named[index * cards : (index + 1) * cards]) for index in range(replicas)]


def _named_cards(visible: str) -> list[str]:
    """The cards of a list as CUDA reads it: up to the first -1 or empty place."""
    named = [each.strip() for each in visible.split(",")]
    return list(takewhile(lambda each: each not in ("", "-1"), named))


@contextmanager
def _copies(
    arguments: Sequence[str], ports: Sequence[int], cards: Sequence[str] | None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Copies that listen on `ports`; each sees its own of `cards`, or without GPUs what there is."""
    copies: list[subprocess.Popen[bytes]] = []
    try:
        for index, port in enumerate(ports):
            command = [sys.executable, "-m", "tightfit", *arguments, "--host", "127.0.0.1", "--port", str(port)]
            environment = os.environ | ({} if cards is None else {VISIBLE: cards[index]})
            copies.append(
                subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
            )
        yield copies
    finally:
        for copy in copies:
            if copy.poll() is None:
                copy.kill()
                copy.wait()


def _end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies, however it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_until_healthy(copies: Sequence[subprocess.Popen[bytes]], ports: Sequence[int]) -> None:
    until = time.monotonic() + START_S
    waiting = list(ports)
    while waiting:
        for index, copy in enumerate(copies):
            if copy.poll() is not None:
                raise UserError(f"copy {index} of the model did not start (exit code {copy.returncode}); see above why")
        if time.monotonic() > until:
            raise UserError(f"{len(waiting)} copies of the model did not start within {START_S:g} s")
        waiting = [port for port in waiting if not _is_healthy(port)]
        time.sleep(LOOK_S)


def _is_healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


def _watch(copies: Sequence[subprocess.Popen[bytes]], server: uvicorn.Server) -> None:
    """End the server when a copy has ended."""
    while all(copy.poll() is None for copy in copies):
        time.sleep(LOOK_S)
    server.should_exit = True
