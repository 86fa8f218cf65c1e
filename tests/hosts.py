"""Hosts: two network namespaces of this machine, joined by a virtual cable that can be cut or slowed down."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

INTERFACE = "eth0"  # of both hosts
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BUFFERS = ("burst", "256kb", "latency", "100ms")  # of a limited cable

_numbers = itertools.count()


class Hosts:
    """The two hosts. A context manager that kills their processes and deletes the namespaces on exit."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.names = [f"pipeshard-{os.getpid()}-{number}-{host}" for host in range(2)]
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            first, second = self.names
            ends = ["name", INTERFACE, "type", "veth", "peer", "name", INTERFACE]
            _ip("-n", first, "link", "add", *ends, "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host, name in enumerate(self.names):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):  # the namespace may not exist
                while pids := self.processes(host):
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.02)
                _ip("netns", "delete", name)
        for process in self._started:
            process.wait()

    def start(
        self, host: int, command: Sequence[str], output: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host."""
        with output.open("wb") as file:
            inside = ["ip", "netns", "exec", self.names[host], *command]
            process = subprocess.Popen(inside, env=environment, stdout=file, stderr=file)
        self._started.append(process)
        return process

    def cut(self, end: int) -> None:
        """Disconnect a host. From now on, packets in both directions are lost, and neither host gets an error."""
        _ip("-n", self.names[end], "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        for name in self.names:
            _ip("-n", name, "link", "set", INTERFACE, "up")

    def limit(self, rate: str) -> None:
        """Limit the rate of the cable in each direction, such as "1gbit"; "" removes the limit."""
        for name in self.names:
            if rate:
                _tc("-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", rate, *BUFFERS)
            else:
                with contextlib.suppress(subprocess.CalledProcessError):  # there was no limit
                    _tc("-n", name, "qdisc", "delete", "dev", INTERFACE, "root")

    def processes(self, host: int) -> list[int]:
        for process in self._started:
            process.poll()
        return [int(pid) for pid in _ip("netns", "pids", self.names[host]).split()]

    def listening(self, host: int) -> list[tuple[str, int]]:
        """The address and port of every TCP and UDP socket that listens on a host; `*` is any address."""
        sockets = _ip("netns", "exec", self.names[host], "ss", "--listening", "--tcp", "--udp", "-nH")
        local = [line.split()[4].rpartition(":") for line in sockets.splitlines()]
        return [("*" if address in ("0.0.0.0", "[::]") else address, int(port)) for address, _, port in local]


@functools.cache
def missing() -> str:
    """The reason why this machine does not support such hosts; "" if it does."""
    try:
        with Hosts() as hosts:
            hosts.listening(0)
    except FileNotFoundError:
        return "the command ip (of Debian's iproute2) is missing"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be created: {error.stderr.strip()}"
    return ""


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _tc(*arguments: str) -> str:
    return _run("tc", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
