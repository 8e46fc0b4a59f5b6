"""Two nodes on one host: two network namespaces joined by a veth pair whose ends are shaped to a rate.

Needs root and the pure-Python package pyroute2. Ranks 0 .. n-1 run in the first namespace, the others in the second,
so that their traffic to each other passes the shaped link, while ranks of one namespace use shared memory or NVLink.
The interface's own tx_bytes counter is an independent check of the wire ledger.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMESPACES = ("zpp0", "zpp1")
INTERFACES = ("zppveth0", "zppveth1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 65000
GBIT = 1e9 / 8


@contextlib.contextmanager
def two_nodes(gbit_per_second: float | None) -> Iterator[None]:
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
                    rate = int(gbit_per_second * GBIT)
                    burst = max(1 << 20, rate // 500)  # 2 ms of the rate
                    node.tc("replace", "tbf", index, 0x10000, rate=rate, latency="100ms", burst=burst)
        yield
    finally:
        _remove()


def _remove() -> None:
    from pyroute2 import netns

    for name in NAMESPACES:
        if name in netns.listnetns():
            netns.remove(name)


def launch(script: str, arguments: Sequence[str], ranks: int, store: Path, timeout: float) -> None:
    """Run `script` on `ranks` ranks, half of them in each node; raises when one fails, after ending the others.

    A rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_INTERFACE and STORE_FILE in its environment.
    """
    per_node = ranks // 2
    processes = []
    for rank in range(ranks):
        node, local = divmod(rank, per_node)
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(per_node),
            "LOCAL_SIZE": str(per_node),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29511",
            "STORE_FILE": str(store),
            "NODE_INTERFACE": INTERFACES[node],
            "NCCL_HOSTID": f"node{node}",
            "NCCL_SOCKET_IFNAME": INTERFACES[node],
            "GLOO_SOCKET_IFNAME": INTERFACES[node],
            "NCCL_IB_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(str(node * per_node + i) for i in range(per_node)),
        }
        command = [sys.executable, __file__, NAMESPACES[node], script, *arguments]
        processes.append(subprocess.Popen(command, env=env))
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            failed = [process.returncode for process in processes if process.returncode not in (None, 0)]
            if failed or time.monotonic() > deadline:
                raise RuntimeError(f"a rank ended with {failed[0]}" if failed else f"not done after {timeout} s")
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


if __name__ == "__main__":  # enter a namespace, then become the script
    from pyroute2 import netns

    netns.setns(sys.argv[1])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
