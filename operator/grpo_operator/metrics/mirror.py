"""Metrics about the mirror of the cluster's objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class MirrorCollector(Collector):
    """The number of objects that the mirror holds, and the time since each of its watches was heard."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds; only their differences matter."""
        self._clock = clock
        self._heard: dict[str, float] = {}
        self.count: Callable[[], Mapping[str, int]] = dict

    def heard(self, kind: str) -> None:
        """Record that a list or a watch of a kind brought something, be it a bookmark."""
        self._heard[kind] = self._clock()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        objects = GaugeMetricFamily(
            "grpo_operator_mirror_objects", "Number of objects that the mirror holds.", labels=["kind"]
        )
        for kind, number in self.count().items():
            objects.add_metric([kind], number)
        age = GaugeMetricFamily(
            "grpo_operator_mirror_age_seconds",
            "Seconds since a kind's watch last brought something; API servers send a bookmark about once a minute.",
            labels=["kind"],
        )
        for kind, heard in self._heard.items():
            age.add_metric([kind], self._clock() - heard)
        yield from (objects, age)
