"""Command lines of the control plane: feature gates, auditing, and where etcd listens."""

from pathlib import Path

from grpo_devcluster import flags
from grpo_devcluster.flags import Endpoints, Features
from grpo_devcluster.pki import Pki

ENDPOINTS = Endpoints("127.0.0.1", 1, 2, 3)
PKI = Pki(Path("/pki"))


def test_feature_gates_reach_every_component() -> None:
    features = Features({"GenericWorkload": True, "Another": False}, {"scheduling.k8s.io/v1beta1": True})
    gates = "--feature-gates=Another=false,GenericWorkload=true"
    assert gates in flags.apiserver(ENDPOINTS, PKI, features, None)
    assert gates in flags.controller_manager(Path("k"), PKI, features, fake_nodes=False)
    assert gates in flags.scheduler(Path("s"), features)
    assert "--runtime-config=scheduling.k8s.io/v1beta1=true" in flags.apiserver(ENDPOINTS, PKI, features, None)


def test_no_gates_no_flag() -> None:
    assert not [f for f in flags.apiserver(ENDPOINTS, PKI, Features(), None) if "feature" in f or "runtime-config" in f]


def test_only_an_address_that_pods_reach_is_an_endpoint_of_the_service() -> None:
    for address in ("127.0.0.1", "10.244.0.1"):
        found = flags.apiserver(Endpoints(address, 1, 2, 3), PKI, Features(), None)
        assert ("--endpoint-reconciler-type=none" in found) == (address == "127.0.0.1")


def test_only_real_nodes_are_lost_after_seconds_without_a_heartbeat() -> None:
    found = {fake: flags.controller_manager(Path("k"), PKI, Features(), fake_nodes=fake) for fake in (True, False)}
    assert "--node-monitor-grace-period=20s" in found[False]
    assert "--node-monitor-grace-period=1h" in found[True]


def test_requests_are_audited_only_if_asked_for() -> None:
    audited = flags.apiserver(ENDPOINTS, PKI, Features(), (Path("/policy"), Path("/log")))
    assert "--audit-log-path=/log" in audited
    assert not [f for f in flags.apiserver(ENDPOINTS, PKI, Features(), None) if "audit" in f]


def test_etcd_listens_on_loopback_only() -> None:
    urls = [f for f in flags.etcd(Endpoints("10.244.0.1", 1, 2, 3), Path("/data")) if "http" in f]
    assert urls
    assert all("127.0.0.1" in url for url in urls)
