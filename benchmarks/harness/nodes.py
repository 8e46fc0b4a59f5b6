"""Links on one host: network namespaces whose interfaces are shaped to a rate. Needs root, and pyroute2.

Two nodes are two namespaces joined by a veth pair. Ranks 0 .. n-1 run in the first, the others in the second, so that
their traffic to each other passes the shaped link, while ranks of one namespace use shared memory or NVLink.

Ranks apart are a namespace each, all on one bridge: one node whose ranks have nothing but a link of their own, shaped
to what each of them sends. What a rank receives is not shaped: in rings and exchanges it is as much as it sends.

The interface's own tx_bytes counter is an independent check of the wire ledger. `launch` also starts ranks without
namespaces, for measurements inside one node.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.harness.environment import ROOT

PLACES = 8  # that ranks may be in
NAMESPACES = [f"zpp{place}" for place in range(PLACES)]
INTERFACES = [f"zppveth{place}" for place in range(PLACES)]
ADDRESSES = [f"10.77.0.{1 + place}" for place in range(PLACES)]
BRIDGE = "zppbridge"
MTU = 65000
GBIT = 1e9 / 8  # bytes per second
TBF_GBIT = 34.0  # that queue takes its rate as 32 bits of bytes per second: 34.36 Gbit/s
ROOT_QUEUE = 0xFFFFFFFF  # TC_H_ROOT


@contextlib.contextmanager
def two_nodes(gbit_per_second: float | None = None) -> Iterator[None]:
    """Create the namespaces and the link (unshaped for None), and remove them again."""
    from pyroute2 import IPRoute, NetNS, netns

    _remove()
    for name in NAMESPACES[:2]:
        netns.create(name)
    try:
        with IPRoute() as host:
            host.link("add", ifname=INTERFACES[0], kind="veth", peer=INTERFACES[1])
            for name, interface in zip(NAMESPACES[:2], INTERFACES):
                host.link("set", index=host.link_lookup(ifname=interface)[0], net_ns_fd=name)
        for place in range(2):
            _set_up(place)
            if gbit_per_second is not None:
                with NetNS(NAMESPACES[place]) as node:
                    _shape(node, node.link_lookup(ifname=INTERFACES[place])[0], gbit_per_second)
        yield
    finally:
        _remove()


@contextlib.contextmanager
def ranks_apart(ranks: int) -> Iterator[None]:
    """Create a namespace for each of `ranks` ranks, all on one bridge (not shaped), and remove them again."""
    from pyroute2 import IPRoute, netns

    _remove()
    try:
        with IPRoute() as host:
            host.link("add", ifname=BRIDGE, kind="bridge")
            bridge = host.link_lookup(ifname=BRIDGE)[0]
            host.link("set", index=bridge, mtu=MTU, state="up")
            for place in range(ranks):
                netns.create(NAMESPACES[place])
                at_bridge = f"{BRIDGE}{place}"
                host.link("add", ifname=INTERFACES[place], kind="veth", peer=at_bridge)
                host.link("set", index=host.link_lookup(ifname=INTERFACES[place])[0], net_ns_fd=NAMESPACES[place])
                host.link("set", index=host.link_lookup(ifname=at_bridge)[0], mtu=MTU, master=bridge, state="up")
                _set_up(place)
        yield
    finally:
        _remove()


def _set_up(place: int) -> None:
    """Give the interface of a namespace its address."""
    from pyroute2 import NetNS

    with NetNS(NAMESPACES[place]) as node:
        index = node.link_lookup(ifname=INTERFACES[place])[0]
        node.addr("add", index=index, address=ADDRESSES[place], prefixlen=24)
        node.link("set", index=index, mtu=MTU)
        node.link("set", index=index, state="up")
        node.link("set", index=node.link_lookup(ifname="lo")[0], state="up")


def _shape(node, index: int, gbit_per_second: float) -> None:
    """Let an interface without a queue send at most so much."""
    rate = int(gbit_per_second * GBIT)
    burst = max(1 << 20, rate // 500)  # 2 ms of the rate
    if gbit_per_second <= TBF_GBIT:
        node.tc("add", "tbf", index, 0x10000, rate=rate, latency="100ms", burst=burst)
        return
    node.tc("add", "htb", index, 0x10000, default=0x10001)
    node.tc("add-class", "htb", index, 0x10001, parent=0x10000, rate=rate, ceil=rate, burst=burst, cburst=burst)


def set_rate(gbit_per_second: float | None) -> None:
    """Shape what leaves this namespace, from inside; None: as fast as it goes. One of its ranks calls it."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as node:
        index = node.link_lookup(ifname=os.environ["NODE_INTERFACE"])[0]
        try:
            node.tc("del", index=index, parent=ROOT_QUEUE)
        except NetlinkError as error:
            if error.code != errno.ENOENT:  # there was no queue to delete
                raise
        if gbit_per_second is not None:
            _shape(node, index, gbit_per_second)


def set_rate_everywhere(gbit_per_second: float | None) -> None:
    """`set_rate` in every namespace, by all ranks together and with nothing of theirs on the way."""
    import torch.distributed as dist

    dist.barrier()
    if os.environ["NODE_SHAPER"] == os.environ["RANK"]:
        set_rate(gbit_per_second)
    dist.barrier()


def _remove() -> None:
    from pyroute2 import IPRoute, netns

    with IPRoute() as host:
        # A namespace is taken away later, and with it the ends at the bridge, whose names the next one needs at once.
        for name in (BRIDGE, *(f"{BRIDGE}{place}" for place in range(PLACES))):
            for index in host.link_lookup(ifname=name):
                host.link("del", index=index)
    for name in NAMESPACES:
        if name in netns.listnetns():
            netns.remove(name)


def launch(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    store: Path,
    timeout: float,
    *,
    nodes: int = 2,
    namespaces: bool = True,
    apart: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
    folders: Sequence[str] = (),
    cwd: str | None = None,
    gpus: int = 0,
) -> None:
    """Run `module` on `ranks` ranks, ended together: when one fails (RuntimeError) or time is up (TimeoutError).

    With `namespaces` each of the two nodes is a namespace, or each rank (`apart`), else all ranks share the host's
    loopback. A rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_INTERFACE, NODE_SHAPER (the rank that
    shapes that interface) and STORE_FILE in its environment, and what `environment` adds. It can import from the root
    of the repository, and from its `folders`; first of all from `cwd`, where it runs. Where there are `gpus` but fewer
    than ranks, ranks share them; NCCL wants a GPU for each rank of a host, and takes each for a host of its own.
    """
    path = [str(ROOT), *(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    per_node, shared = ranks // nodes, 0 < gpus < ranks
    processes = []
    for rank in range(ranks):
        node, local = divmod(rank, per_node)
        place = rank if apart else node
        interface = INTERFACES[place] if namespaces else "lo"
        visible = [rank % gpus] if shared else [node * per_node + i for i in range(per_node)]
        env = {
            # NVLink multicast engages the fabric manager of the host, which others may share: off unless asked for.
            "NCCL_NVLS_ENABLE": "0",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0" if shared else str(local),  # the device among those that it sees
            "LOCAL_WORLD_SIZE": str(per_node),
            "LOCAL_SIZE": str(per_node),
            "MASTER_ADDR": ADDRESSES[0] if namespaces else "127.0.0.1",
            "MASTER_PORT": "29511",
            "STORE_FILE": str(store),
            "NODE_INTERFACE": interface,
            "NODE_SHAPER": str(rank if apart else node * per_node),
            "NCCL_HOSTID": f"rank{rank}" if shared else f"node{node}",
            "NCCL_SOCKET_IFNAME": interface,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_IB_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible)),
            **environment,
        }
        enter = ["-m", __spec__.name, NAMESPACES[place]] if namespaces else []
        processes.append(subprocess.Popen([sys.executable, *enter, "-m", module, *arguments], env=env, cwd=cwd))
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            failed = [process.returncode for process in processes if process.returncode not in (None, 0)]
            if failed:
                raise RuntimeError(f"a rank ended with {failed[0]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {timeout:.0f} s")
            time.sleep(0.1)
        if any(process.returncode for process in processes):
            raise RuntimeError(f"ranks ended with {[process.returncode for process in processes]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def sent_bytes() -> int:
    """tx_bytes of this node's interface, from inside its namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == os.environ["NODE_INTERFACE"]:
            return int(rest.split()[8])
    raise RuntimeError(f"no interface {os.environ['NODE_INTERFACE']} here")


def tcp_timeouts() -> int:
    """How often TCP in this node's namespace has waited in vain, for 200 ms and more, for what it sent to arrive."""
    names, values = (
        line.split() for line in Path("/proc/self/net/netstat").read_text().splitlines() if line.startswith("TcpExt:")
    )
    return int(values[names.index("TCPTimeouts")])


if __name__ == "__main__":  # enter a namespace, then become what is to run there
    from pyroute2 import netns

    netns.setns(sys.argv[1])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
