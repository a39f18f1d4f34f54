"""Prometheus metrics of the daemon, for a scrape on a loopback address: the extra `metrics`.

    kilter_leases                   1 for each lease in force: gpu, user, pid, program
    kilter_setting_sm_clock_hertz   what is set under it; so are setting_memory_clock_hertz and
                                    setting_power_limit_watts
    kilter_lease_energy_joules      of the GPU since the lease began
    kilter_energy_joules_total      of GPUs under leases, by user
    kilter_sets_total, kilter_restores_total, kilter_refusals_total

One request is served at a time, in a thread of its own: whoever is slow delays other scrapes, for
some seconds, and no lease.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from kilter.core.errors import FileError, UsageError

if TYPE_CHECKING:
    from kilter.lease.daemon.service import Service

SCRAPE_S = 5.0
"""A request has this time to be there, and its answer to be taken."""
OF_A_LEASE = ("gpu", "user", "pid", "program")


class DaemonMetrics:
    """A collector as prometheus_client knows them. Only reads; from any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        gauges = {
            name: GaugeMetricFamily(f"kilter_{name}", text, labels=OF_A_LEASE)
            for name, text in (
                ("leases", "Leases in force"),
                ("setting_sm_clock_hertz", "Highest SM clock that is allowed under a lease"),
                ("setting_memory_clock_hertz", "Highest memory clock allowed under a lease"),
                ("setting_power_limit_watts", "Power limit under a lease"),
                ("lease_energy_joules", "Energy of the GPU since its lease began"),
            )
        }
        for client, holding in self._service.leases():
            labels = (holding.uuid, client.user.name, str(client.peer.pid), client.program)
            now = holding.setting
            for name, value in (
                ("leases", 1.0),
                ("setting_sm_clock_hertz", now.sm_clock_hz),
                ("setting_memory_clock_hertz", now.memory_clock_hz),
                ("setting_power_limit_watts", now.power_limit_w),
                ("lease_energy_joules", holding.energy_j),
            ):
                if value is not None:
                    gauges[name].add_metric(labels, value)
        yield from gauges.values()
        ledger = self._service.ledger
        for name, text, counts in (
            ("energy_joules", "Energy of GPUs under leases", ledger.energy_j),
            ("sets", "Settings that were made", ledger.sets),
            ("restores", "Leases after which the found setting is back", ledger.restores),
        ):
            family = CounterMetricFamily(f"kilter_{name}", text, labels=("user",))
            for user, count in list(counts.items()):
                family.add_metric((user,), count)
            yield family
        refusals = CounterMetricFamily(
            "kilter_refusals", "Requests that were refused", labels=("user", "error")
        )
        for key, count in list(ledger.refusals.items()):
            refusals.add_metric(key, count)
        yield refusals


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_S

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def serve_metrics(service: Service, address: str) -> None:
    """Begin to serve `HOST:PORT`. Raises `UsageError` for an address that is not this machine's own
    (loopback) or where prometheus-client is missing, and `FileError` if it cannot be had."""
    host, _, port = address.rpartition(":")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
        number = int(port)
    except ValueError:
        raise UsageError(f"--metrics {address}: expected HOST:PORT, as 127.0.0.1:9465") from None
    if not loopback:
        raise UsageError(f"--metrics {address}: only a loopback address, as 127.0.0.1:9465")
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        raise UsageError(
            "--metrics needs prometheus-client: pip install 'kilter[metrics]'"
        ) from None
    registry = CollectorRegistry()
    registry.register(DaemonMetrics(service))
    try:
        server = make_server(host, number, make_wsgi_app(registry), handler_class=_Handler)
    except (OSError, OverflowError) as error:
        raise FileError(f"{address}: no metrics there ({error})") from error
    threading.Thread(target=server.serve_forever, name="kilter-metrics", daemon=True).start()
