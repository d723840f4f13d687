"""Turns figures into the client library's families, one for every line of the table."""

from collections.abc import Iterator, Mapping
from math import isinf
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from infra.metrics.catalogue import METRICS, Metric
from infra.metrics.tally import Histogram, Labels, Series


class Figures(NamedTuple):
    """All series of one scrape."""

    values: Mapping[Series, float]
    histograms: Mapping[Series, Histogram]


def families(figures: Figures) -> Iterator[Family]:
    """Yield a family per metric of the table, also where there is no series."""
    values: dict[str, dict[Labels, float]] = {}
    for (name, labels), value in figures.values.items():
        values.setdefault(name, {})[labels] = value
    for metric in METRICS:
        if metric.kind == "histogram":
            yield _histogram(metric, figures.histograms)
            continue
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.meaning, labels=metric.labels)
        for labels, value in values.get(metric.name, {}).items():
            family.add_metric(labels, value)
        yield family


def _histogram(metric: Metric, histograms: Mapping[Series, Histogram]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for (name, labels), figures in histograms.items():
        if name == metric.name:
            buckets = [
                ("+Inf" if isinf(bound) else str(bound), count) for bound, count in figures.cumulative()
            ]
            family.add_metric(labels, buckets, figures.total)
    return family
