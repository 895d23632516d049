"""A reward function that tries to leave its sandbox: the reward says which attempts succeeded.

Each completion is an attempt, as JSON: its name and its arguments.
"""

import ctypes
import glob
import json
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)


def escape(completions, **columns):
    """1 for each attempt that succeeds, 0 for each that the system refuses."""
    return [attempt(*json.loads(text)) for text in completions]


def look_around(completions, **columns):
    """Prints how much of the run it finds."""
    places = [Path(path) for path in glob.glob("/tmp/rolemesh-*/*")]
    ports = [int(port, 16) for port in _listening("/proc/self/net/tcp")]
    found = {
        "keys": sum(attempt("read", path) for path in places if path.suffix == ".pem"),
        "sockets": sum(attempt("connect_to_file", str(path)) for path in places),
        "ports": sum(attempt("connect", port) for port in ports),
        "processes": sum(_is_of_mesh(path) for path in glob.glob("/proc/[0-9]*/cmdline")),
    }
    told = json.dumps({name: int(count) for name, count in found.items()})
    # In one piece, which makes one line of the log.
    os.write(1, f"found {told}\n".encode())
    return [float(len(text)) for text in completions]


def _listening(path):
    lines = [line.split() for line in Path(path).read_text().splitlines()[1:]]
    return [words[1].partition(":")[2] for words in lines if words[3] == "0A"]


def _is_of_mesh(path):
    try:
        return b"rolemesh.services.actor" in Path(path).read_bytes()
    except OSError:
        return False


def attempt(name, *arguments):
    try:
        ATTEMPTS[name](*arguments)
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return 1.0


def read(path):
    assert Path(path).read_bytes()


def read_in_a_child(path):
    subprocess.run(["cat", path], check=True, capture_output=True)


def write(path):
    Path(path).write_bytes(b"planted")


def empty(path):
    os.truncate(path, 0)


def empty_while_reading(path):
    os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))


def change_mode(path):
    Path(path).chmod(0o666)


def change_mode_of_an_open_file(path):
    with open(path) as file:
        os.fchmod(file.fileno(), 0o666)


def move(path):
    Path(path).rename(f"{path}.moved")


def remove(path):
    Path(path).unlink()


def connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def send_datagram(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        # An empty namespace has a loopback of its own: there nobody answers.
        sender.settimeout(5)
        sender.connect(("127.0.0.1", port))
        sender.send(b"x")
        sender.recv(1)


def connect_to_file(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def send_datagram_to_file(path):
    sender, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender, other:
        sender.sendto(b"x", path)


def list_processes(pid):
    if str(pid) not in os.listdir("/proc"):
        raise PermissionError(f"{pid} is not among the processes")
    Path(f"/proc/{pid}/cmdline").read_bytes()


def stop(pid):
    os.kill(pid, signal.SIGTERM)


def limit(pid):
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (16, 16))


def attach_memory(key):
    if LIBC.shmget(key, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


ATTEMPTS = {
    function.__name__: function
    for function in (
        *(read, read_in_a_child, write, empty, empty_while_reading, change_mode, move, remove),
        *(connect, send_datagram, connect_to_file, list_processes, stop, limit, attach_memory),
        *(change_mode_of_an_open_file, send_datagram_to_file),
    )
}
