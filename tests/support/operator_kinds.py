"""The kinds that KEDA and the Prometheus operator define, as far as the Helm chart may use them.

Facts of keda.sh/v1alpha1 (KEDA 2) and monitoring.coreos.com/v1, as JSON schemas that refuse every
field which is not listed: the API server would drop a misspelt one without a word.  The full
definitions are for `make test-deploy CRDS=FOLDER`.
"""

from __future__ import annotations

from typing import Any

STRING: dict[str, Any] = {"type": "string", "minLength": 1}
STRINGS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
DURATION: dict[str, Any] = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d|w|y))+$"}


def record(required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


SCALING = record(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=listed(
        record(
            ("type", "value", "periodSeconds"),
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
SCALED_OBJECT = record(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=record(("name",), apiVersion=STRING, kind=STRING, name=STRING),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    idleReplicaCount=COUNT,
    pollingInterval=COUNT,
    cooldownPeriod=COUNT,
    advanced=record(
        restoreToOriginalReplicaCount={"type": "boolean"},
        horizontalPodAutoscalerConfig=record(
            name=STRING, behavior=record(scaleUp=SCALING, scaleDown=SCALING)
        ),
    ),
    triggers=listed(
        record(
            ("type", "metadata"),
            type={"const": "prometheus"},
            name=STRING,
            metricType={"enum": ["AverageValue", "Value"]},
            useCachedMetrics={"type": "boolean"},
            authenticationRef=record(("name",), name=STRING, kind=STRING),
            # Of the scaler `prometheus`: texts all of them, numbers too.
            metadata=record(
                ("serverAddress", "query", "threshold"),
                serverAddress=STRING,
                query=STRING,
                threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
                activationThreshold=STRING,
                namespace=STRING,
                ignoreNullValues={"enum": ["true", "false"]},
            ),
        )
    ),
)
SECRET_KEY = record(("key",), name=STRING, key=STRING, optional={"type": "boolean"})
SERVICE_MONITOR = record(
    ("selector", "endpoints"),
    jobLabel=STRING,
    selector=record(matchLabels=STRINGS),
    namespaceSelector=record(any={"type": "boolean"}, matchNames=listed(STRING)),
    targetLabels=listed(STRING),
    endpoints=listed(
        record(
            port=STRING,
            path=STRING,
            scheme={"enum": ["http", "https"]},
            interval=DURATION,
            scrapeTimeout=DURATION,
            authorization=record(type=STRING, credentials=SECRET_KEY),
        )
    ),
)
PROMETHEUS_RULE = record(
    ("groups",),
    groups=listed(
        record(
            ("name", "rules"),
            name=STRING,
            interval=DURATION,
            rules=listed(
                record(
                    ("expr",),
                    record=STRING,
                    alert=STRING,
                    expr=STRING,
                    labels=STRINGS,
                    annotations=STRINGS,
                    **{"for": DURATION},
                )
            ),
        )
    ),
)
METADATA = record(("name",), name=STRING, namespace=STRING, labels=STRINGS, annotations=STRINGS)
KINDS = {
    kind: record(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )
    for kind, version, spec in (
        ("ScaledObject", "keda.sh/v1alpha1", SCALED_OBJECT),
        ("ServiceMonitor", "monitoring.coreos.com/v1", SERVICE_MONITOR),
        ("PrometheusRule", "monitoring.coreos.com/v1", PROMETHEUS_RULE),
    )
}
