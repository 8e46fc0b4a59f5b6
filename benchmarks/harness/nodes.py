"""Two nodes on one host: two network namespaces joined by a veth pair whose ends are shaped to a rate.

Needs root and the pure-Python package pyroute2. Ranks 0 .. n-1 run in the first namespace, the others in the second,
so that their traffic to each other passes the shaped link, while ranks of one namespace use shared memory or NVLink.
The interface's own tx_bytes counter is an independent check of the wire ledger. `launch` also starts ranks without
namespaces, for measurements inside one node.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.environment import ROOT

NAMESPACES = ("zpp0", "zpp1")
INTERFACES = ("zppveth0", "zppveth1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 65000
GBIT = 1e9 / 8  # bytes per second
MAX_GBIT = 34.0  # the tbf queue takes its rate as 32 bits of bytes per second: 34.36 Gbit/s


@contextlib.contextmanager
def two_nodes(gbit_per_second: float | None = None) -> Iterator[None]:
    """Create the namespaces and the link (unshaped for None), and remove them again."""
    from pyroute2 import IPRoute, NetNS, netns

    _remove()
    for name in NAMESPACES:
        netns.create(name)
    try:
        with IPRoute() as host:
            host.link("add", ifname=INTERFACES[0], kind="veth", peer=INTERFACES[1])
            for name, interface in zip(NAMESPACES, INTERFACES):
                host.link("set", index=host.link_lookup(ifname=interface)[0], net_ns_fd=name)
        for name, interface, address in zip(NAMESPACES, INTERFACES, ADDRESSES):
            with NetNS(name) as node:
                index = node.link_lookup(ifname=interface)[0]
                node.addr("add", index=index, address=address, prefixlen=24)
                node.link("set", index=index, mtu=MTU)
                node.link("set", index=index, state="up")
                node.link("set", index=node.link_lookup(ifname="lo")[0], state="up")
                if gbit_per_second is not None:
                    _shape(node, index, gbit_per_second)
        yield
    finally:
        _remove()


def _shape(node, index: int, gbit_per_second: float) -> None:
    rate = int(gbit_per_second * GBIT)
    burst = max(1 << 20, rate // 500)  # 2 ms of the rate
    node.tc("replace", "tbf", index, 0x10000, rate=rate, latency="100ms", burst=burst)


def set_rate(gbit_per_second: float | None) -> None:
    """Shape what this node sends, from inside its namespace; None: as fast as it goes. One rank a node calls it."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as node:
        index = node.link_lookup(ifname=os.environ["NODE_INTERFACE"])[0]
        if gbit_per_second is not None:
            _shape(node, index, gbit_per_second)
        else:
            with contextlib.suppress(NetlinkError):  # there was no queue to delete
                node.tc("del", index=index, parent=0xFFFF0000)  # TC_H_ROOT


def set_rate_everywhere(gbit_per_second: float | None) -> None:
    """`set_rate` on every node, by all ranks together and with nothing of theirs on the way."""
    import torch.distributed as dist

    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        set_rate(gbit_per_second)
    dist.barrier()


def _remove() -> None:
    from pyroute2 import netns

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
    folders: Sequence[str] = (),
    cwd: str | None = None,
) -> None:
    """Run `module` on `ranks` ranks, ended together: when one fails (RuntimeError) or time is up (TimeoutError).

    With `namespaces` each of the two nodes is a namespace, else all ranks share the host's loopback. A rank finds RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_INTERFACE and STORE_FILE in its environment. It can import from the
    root of the repository, and from its `folders`; first of all from `cwd`, where it runs.
    """
    path = [str(ROOT), *(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    per_node = ranks // nodes
    processes = []
    for rank in range(ranks):
        node, local = divmod(rank, per_node)
        interface = INTERFACES[node] if namespaces else "lo"
        env = {
            # NVLink multicast engages the fabric manager of the host, which others may share: off unless asked for.
            "NCCL_NVLS_ENABLE": "0",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(per_node),
            "LOCAL_SIZE": str(per_node),
            "MASTER_ADDR": ADDRESSES[0] if namespaces else "127.0.0.1",
            "MASTER_PORT": "29511",
            "STORE_FILE": str(store),
            "NODE_INTERFACE": interface,
            "NCCL_HOSTID": f"node{node}",
            "NCCL_SOCKET_IFNAME": interface,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_IB_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(str(node * per_node + i) for i in range(per_node)),
        }
        enter = ["-m", __spec__.name, NAMESPACES[node]] if namespaces else []
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


if __name__ == "__main__":  # enter a namespace, then become what is to run there
    from pyroute2 import netns

    netns.setns(sys.argv[1])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
