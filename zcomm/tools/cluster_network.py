"""The network of an emulated cluster: one namespace per node, veth pairs to a bridge, a shaper on each pair's ends.

    node 0: eth0 10.0.0.1 ==veth== port0 \\
    node 1: eth0 10.0.0.2 ==veth== port1  > bridge zcomm0, in the namespace of the calling process
    ...                                  /

What leaves a node is shaped on its eth0, what enters it on the bridge's end: a full-duplex link of the asked rate. All
over netlink (pyroute2). Nothing is ever removed: namespaces and links end with the processes that hold them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from zcomm.errors import ClusterError, MissingExtra
from zcomm.tools import cluster_kernel
from zcomm.tools.link import Link

INTERFACE = "eth0"
BRIDGE = "zcomm0"

# [Note: burst] What fits tbf's burst is not shaped at all, so it must be small beside any message worth
# measuring; yet the timer that refills it must not limit the rate. A packet larger than the burst would be
# cut into wire-size packets, costing CPU and changing the byte counters, so the sender is told never to build
# one (gso_max_size). tbf counts 66 bytes of headers per 1448-byte segment where the interface counts one
# header per packet: hence the margin.
_BURST_S = 2e-3
_BURST_MIN, _BURST_MAX = 32 * 1024, 4 * 1024 * 1024  # bytes
_GSO_MAX = 65536  # bytes, the kernel's default
_QUEUE_S = 50e-3  # what a switch port may hold before it drops
_QUEUE_MIN = 1024 * 1024  # bytes
_NETEM_PACKETS = 100_000

_ROOT = 0xFFFFFFFF  # TC_H_ROOT
_NETEM_CHILD = 0x00010001  # class 1:1 of the netem at handle 1:


@dataclass(frozen=True)
class Node:
    """One emulated node: the process that keeps its namespaces, and its address."""

    index: int
    keeper_pid: int
    address: str
    host_name: str | None  # None: shares the machine's own


@dataclass(frozen=True)
class Shaping:
    """What was really applied to each node's link, for the report."""

    rate: str  # "tbf", "none" or "paced in user space"
    latency: str  # "netem", "none" or why not
    burst_bytes: int | None = None


def address_of(node: int) -> str:
    """The node's address: node 0 is 10.0.0.1."""
    return f"10.0.0.{node + 1}"


def burst_bytes(link: Link) -> int:
    """The burst of tbf for a limited link, see [Note: burst]."""
    return int(min(max(link.bytes_s * _BURST_S, _BURST_MIN), _BURST_MAX))


def gso_max_bytes(link: Link) -> int:
    """The largest packet a sender may hand to a limited link, see [Note: burst]."""
    return min(_GSO_MAX, int(burst_bytes(link) / 1.05) - 256)


def build(
    n_nodes: int,
    link: Link,
    latency_s: float,  # one way, node to node
    host_names: bool,  # give each node the host name node<i>
) -> tuple[list[Node], Shaping]:
    """Make the bridge in this process's network namespace, and the nodes as children of this process.

    Raises ClusterError if the kernel refuses a part that cannot be left out. Call while single-threaded: it
    forks.
    """
    _import_pyroute2()  # once, before the keepers fork
    started = [_start_keeper(index, link, latency_s, host_names) for index in range(n_nodes)]
    shaping = Shaping("none", "none")
    _silence_ipv6("default")
    with _open_netlink() as iproute:
        with _explained("a bridge"):
            iproute.link("add", ifname=BRIDGE, kind="bridge")
            bridge = iproute.link_lookup(ifname=BRIDGE)[0]
            iproute.link("set", index=bridge, state="up")
        for node, keeper in started:
            _plug_in(iproute, node, bridge, link)
            shaping = _finish(keeper)
    return [node for node, _ in started], shaping


def own_shared_memory() -> None:
    """Give this process's mount namespace a /dev/shm of its own, where that works.

    MPICH names what its ranks share there after process numbers and the second: two clusters that start together would
    meet, and wait for ever. What killed ranks leave there goes with the cluster. The machine's own folders there stay
    in sight: a checkout, data.
    """
    shared = "/dev/shm"
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        before = os.open(shared, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, before)
        folders = [entry.name for entry in os.scandir(before) if entry.is_dir(follow_symlinks=False)]
        cluster_kernel.mount_memory(os.fsencode(shared))
        for name in folders:
            with contextlib.suppress(OSError):
                os.mkdir(f"{shared}/{name}")
                source, target = f"/proc/self/fd/{before}/{name}", f"{shared}/{name}"
                cluster_kernel.bind_mount(os.fsencode(source), os.fsencode(target))


def name_hosts(n_nodes: int) -> bool:
    """Make node0, node1, ... resolvable in this process's mount namespace; whether that worked.

    Where it did not, nodes keep the machine's own host name.
    """
    try:
        with tempfile.NamedTemporaryFile("w", prefix="zcomm-hosts-") as hosts:
            with contextlib.suppress(OSError), open("/etc/hosts") as own:
                hosts.write(own.read() + "\n")
            for node in range(n_nodes):
                hosts.write(f"{address_of(node)} node{node}\n")
                # torch looks up the IPv6 spelling of its peers and warns where that has no name
                hosts.write(f"::ffff:{address_of(node)} node{node}.cluster\n")
            hosts.flush()
            os.fchmod(hosts.fileno(), 0o644)
            cluster_kernel.bind_mount(hosts.name.encode(), b"/etc/hosts")
    except OSError:
        return False
    return True


def _start_keeper(index: int, link: Link, latency_s: float, host_names: bool) -> tuple[Node, socket.socket]:
    """Fork the process that keeps node index's namespaces; returns once they exist."""
    parent = os.getpid()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = Node(index, 0, address_of(index), f"node{index}" if host_names else None)
    pid = os.fork()
    if pid == 0:
        here.close()
        _keep(parent, node, link, latency_s, there)
    there.close()
    _receive(here)
    return replace(node, keeper_pid=pid), here


def _keep(parent: int, node: Node, link: Link, latency_s: float, builder: socket.socket) -> NoReturn:
    """The keeper's life: make the namespaces, wait for eth0, configure it, sleep until the parent ends."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        cluster_kernel.die_with_parent(parent)
        try:
            uts = cluster_kernel.CLONE_NEWUTS if node.host_name else 0
            cluster_kernel.leave_namespaces(cluster_kernel.CLONE_NEWNET | uts)
            if node.host_name:
                cluster_kernel.set_host_name(node.host_name.encode())
            _send(builder)
            builder.recv(1)
            shaping = _configure_inside(node.address, link, latency_s)
            _send(builder, shaping=asdict(shaping))
        except (ClusterError, OSError) as problem:
            _send(builder, problem=str(problem))
        builder.close()
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _plug_in(iproute: Any, node: Node, bridge: int, link: Link) -> None:
    """Make node's veth pair: one end becomes the node's eth0, the other is shaped and joins the bridge."""
    port_name, far_name = f"port{node.index}", f"far{node.index}"
    with _explained("a veth pair"):
        iproute.link("add", ifname=port_name, kind="veth", peer={"ifname": far_name})
        port = iproute.link_lookup(ifname=port_name)[0]
        far = iproute.link_lookup(ifname=far_name)[0]
        if link.bits_s is not None:
            iproute.link("set", index=port, gso_max_size=gso_max_bytes(link))
            iproute.link("set", index=far, gso_max_size=gso_max_bytes(link))
        iproute.link("set", index=far, net_ns_pid=node.keeper_pid, ifname=INTERFACE)
        iproute.link("set", index=port, master=bridge, state="up")
    _shape(iproute, port, link, latency_s=0.0)


def _finish(keeper: socket.socket) -> Shaping:
    """Tell a keeper that its eth0 is there; returns what it applied."""
    keeper.send(b"\0")
    shaping = Shaping(**_receive(keeper)["shaping"])
    keeper.close()
    return shaping


def _configure_inside(address: str, link: Link, latency_s: float) -> Shaping:
    """In the node: lo and eth0 up, the address, the shaper."""
    _silence_ipv6(INTERFACE)
    with _open_netlink() as iproute:
        with _explained("a node's interfaces"):
            eth0 = iproute.link_lookup(ifname=INTERFACE)[0]
            iproute.addr("add", index=eth0, address=address, prefixlen=24)
            iproute.link("set", index=iproute.link_lookup(ifname="lo")[0], state="up")
        shaping = _shape(iproute, eth0, link, latency_s)
        with _explained("a node's interfaces"):
            iproute.link("set", index=eth0, state="up")
    return shaping


def _silence_ipv6(interface: str) -> None:
    """Keep neighbour discovery out of the counters; with a read-only /proc/sys some hundred bytes stay."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6", "w") as switch,
    ):
        switch.write("1")


def _shape(iproute: Any, interface: int, link: Link, latency_s: float) -> Shaping:
    """Put netem (latency, if the kernel has it) and under it tbf (rate) onto what interface sends."""
    latency, parent = "none", _ROOT
    if latency_s > 0:
        latency = _try_netem(iproute, interface, latency_s)
        if latency == "netem":
            parent = _NETEM_CHILD
    if link.bits_s is None:
        return Shaping("none", latency)
    burst = burst_bytes(link)
    with _explained("the rate shaper tbf"):
        iproute.tc(
            "add",
            "tbf",
            interface,
            handle="2:",
            parent=parent,
            rate=int(link.bytes_s),  # bytes per second
            burst=burst,
            limit=burst + int(max(link.bytes_s * _QUEUE_S, _QUEUE_MIN)),
        )
    return Shaping("tbf", latency, burst)


def _try_netem(iproute: Any, interface: int, latency_s: float) -> str:
    """Add netem, or say why not."""
    try:
        iproute.tc("add", "netem", interface, handle="1:", delay=round(latency_s * 1e6), limit=_NETEM_PACKETS)
    except Exception as problem:
        if getattr(problem, "code", None) != errno.ENOENT:
            raise ClusterError(f"the kernel refused the delay netem: {problem}") from problem
        return "not applied: this kernel has no netem"
    return "netem"


def _send(to: socket.socket, **message: Any) -> None:
    to.send(json.dumps(message).encode())


def _receive(keeper: socket.socket) -> dict[str, Any]:
    """A keeper's next message. Raises ClusterError if it failed or ended."""
    message: dict[str, Any] = json.loads(keeper.recv(65536) or b'{"problem": "a node ended while it was built"}')
    if "problem" in message:
        raise ClusterError(message["problem"])
    return message


def _open_netlink() -> Any:
    return _import_pyroute2().IPRoute()


def _import_pyroute2() -> Any:
    try:
        import pyroute2
    except ImportError as problem:
        raise MissingExtra(
            f"an emulated cluster needs pyroute2 ({problem}); pip install 'zcomm-collectives[tools]'"
        ) from problem
    return pyroute2


@contextlib.contextmanager
def _explained(part: str) -> Iterator[None]:
    """Turn a refusal of netlink into a ClusterError that names the part."""
    try:
        yield
    except ClusterError:
        raise
    except Exception as problem:  # pyroute2's NetlinkError derives from Exception alone
        missing = getattr(problem, "code", None) in (errno.ENOENT, errno.EOPNOTSUPP)
        why = "this kernel has none" if missing else f"the kernel refused it: {problem}"
        raise ClusterError(f"the emulated cluster needs {part}, but {why}") from problem
