"""The bridge of nodes and pods, and the rules that keep their traffic on this machine."""

import ipaddress
import json
import re
import subprocess
from pathlib import Path

from grpo_devcluster import flags

BRIDGE = "grpo0"
POD_RANGE = ipaddress.ip_network("10.244.0.0/16")
GATEWAY = "10.244.0.1"
_MARK = "grpo-devcluster"
_SYSCTLS = {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"}


def node_address(index: int) -> str:
    """Return the address of a node on the bridge; the kubelet refuses loopback."""
    return f"10.244.0.{10 + index}"


def pod_range(index: int) -> tuple[str, str]:
    """Return the first and last pod address of a node; nodes share a subnet, so they need no routes between them."""
    return f"10.244.{index + 1}.2", f"10.244.{index + 1}.254"


def up(nodes: int, before: Path) -> None:
    """Create the missing parts of bridge, addresses, routes and rules; `before` keeps the sysctls that they replace."""
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("link", "set", BRIDGE, "up")
    _ip("address", "replace", f"{GATEWAY}/{POD_RANGE.prefixlen}", "dev", BRIDGE)
    for index in range(nodes):
        _ip("address", "replace", f"{node_address(index)}/32", "dev", BRIDGE)
    # A service address that kube-proxy does not translate ends here, instead of on the default route.
    _ip("route", "replace", "blackhole", flags.SERVICE_RANGE)
    if not before.exists():
        before.write_text(json.dumps({name: Path("/proc/sys", name).read_text() for name in _SYSCTLS}))
    for name, value in _SYSCTLS.items():
        Path("/proc/sys", name).write_text(value)
    for rule in _rules():
        if not _iptables("-C", rule, check=False):
            _iptables("-I", rule)


def down(before: Path) -> None:
    """Remove everything, including the rules of kube-proxy and the kubelet."""
    if before.exists():
        for name, value in json.loads(before.read_text()).items():
            Path("/proc/sys", name).write_text(value)
    for rule in _rules():
        while _iptables("-D", rule, check=False):
            continue
    for family in ("iptables", "ip6tables"):
        _drop_kubernetes_rules(family)
    subprocess.run(["ip", "route", "del", "blackhole", flags.SERVICE_RANGE], capture_output=True, check=False)
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "del", BRIDGE)
    subprocess.run(["conntrack", "-D", "-s", str(POD_RANGE)], capture_output=True, check=False)


def without_kubernetes(saved: str) -> str:
    """Remove the chains of kube-proxy and the kubelet, and the jumps to them, from the output of iptables-save."""
    ours = re.compile(r"^(:KUBE-|-A KUBE-|-A \S+ .*-j KUBE-)")
    return "".join(line for line in saved.splitlines(keepends=True) if not ours.match(line))


def _rules() -> list[list[str]]:
    comment = ["-m", "comment", "--comment", _MARK]
    return [
        # Each is inserted at the top, so the second comes first.
        ["FORWARD", "-i", BRIDGE, "!", "-o", BRIDGE, *comment, "-j", "REJECT"],
        ["FORWARD", "-i", BRIDGE, "-o", BRIDGE, *comment, "-j", "ACCEPT"],
    ]


def _drop_kubernetes_rules(family: str) -> None:
    saved = subprocess.run([f"{family}-save"], capture_output=True, text=True, check=False)
    if saved.returncode == 0 and "KUBE-" in saved.stdout:
        subprocess.run([f"{family}-restore"], input=without_kubernetes(saved.stdout), text=True, check=True)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def _iptables(action: str, rule: list[str], *, check: bool = True) -> bool:
    done = subprocess.run(["iptables", "-w", action, *rule], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"iptables {action} {' '.join(rule)}: {done.stderr.strip()}")
    return done.returncode == 0
