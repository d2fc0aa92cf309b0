"""Schemas of the custom resources that the chart makes, as far as it uses them. Unknown fields are refused.

Written from the resources' API references: Prometheus operator v0.7x, Gateway API v1.1, its Inference Extension v1,
KEDA v2. They are stricter than the
projects' own CRDs (a label selector may hold more than the chart ever writes), and no package that this project may use
ships those. To compare with them: `CRD_DIR=... pytest tests/deploy` (last done with
those of August 2026: Prometheus operator, KEDA, Gateway API and its Inference Extension).
"""

from __future__ import annotations

from typing import Any

import jsonschema

_TEXT = {"type": "string", "minLength": 1}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^(0|([0-9]+(ms|s|m|h|d))+)$"}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_SELECTOR = _closed(["matchLabels"], matchLabels=_LABELS)
_RELABELING = _closed(
    [],
    action={
        "type": "string",
        "pattern": "^(?i:replace|keep|drop|hashmod|labelmap|labeldrop|labelkeep|(upper|lower)case)$",
    },
    sourceLabels=_list(_TEXT),
    targetLabel=_TEXT,
    regex=_TEXT,
    replacement={"type": "string"},
    separator={"type": "string"},
    modulus={"type": "integer"},
)
_NAMESPACES = _closed([], any={"type": "boolean"}, matchNames=_list(_TEXT))
_ENDPOINT = _closed(
    ["port"],
    port=_TEXT,
    path={"type": "string", "pattern": "^/"},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    relabelings=_list(_RELABELING),
    metricRelabelings=_list(_RELABELING),
    scheme={"enum": ["http", "https"]},
    tlsConfig=_closed([], insecureSkipVerify={"type": "boolean"}),
)
_ALERT = _closed(
    ["alert", "expr", "labels", "annotations"],
    alert={"type": "string", "pattern": "^[A-Z][A-Za-z]+$"},
    expr=_TEXT,
    **{"for": _DURATION},
    labels=_closed(["severity"], severity={"enum": ["critical", "warning"]}),
    annotations=_closed(["summary", "description"], summary=_TEXT, description=_TEXT),
)
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_PARENT = _closed(["name"], group=_TEXT, kind=_TEXT, name=_TEXT, namespace=_TEXT, sectionName=_TEXT)
_GATEWAY_DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_ROUTE_RULE = _closed(
    ["backendRefs"],
    matches=_list(_closed(["path"], path=_closed(["type", "value"], type={"enum": ["PathPrefix"]}, value=_TEXT))),
    timeouts=_closed([], request=_GATEWAY_DURATION, backendRequest=_GATEWAY_DURATION),
    backendRefs=_list(
        {
            "oneOf": [
                _closed(["name", "port"], name=_TEXT, port=_PORT),
                _closed(
                    ["group", "kind", "name"],
                    group={"const": "inference.networking.k8s.io"},
                    kind={"const": "InferencePool"},
                    name=_TEXT,
                ),
            ]
        }
    ),
)
_POOL = _closed(
    ["selector", "targetPorts", "endpointPickerRef"],
    selector=_SELECTOR,
    targetPorts=_list(_closed(["number"], number=_PORT)) | {"maxItems": 8, "uniqueItems": True},
    endpointPickerRef=_closed(
        ["name", "port"],
        name=_TEXT,
        port=_closed(["number"], number=_PORT),
        failureMode={"enum": ["FailClose", "FailOpen"]},
    ),
)
_PROMETHEUS = {
    "required": ["serverAddress", "query", "threshold"],
    "properties": {
        "serverAddress": {"pattern": "^https?://"},
        "query": _TEXT,
        "threshold": {"pattern": r"^[0-9]+(\.[0-9]+)?$"},
        "activationThreshold": {"pattern": r"^[0-9]+(\.[0-9]+)?$"},
        "ignoreNullValues": {"enum": ["true", "false"]},
    },
}
_TRIGGER = _closed(
    ["type", "metadata"],
    type=_TEXT,
    name=_TEXT,
    metadata=_LABELS,
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    useCachedMetrics={"type": "boolean"},
    authenticationRef=_closed(
        ["name"], name=_TEXT, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}
    ),
)
_FALLBACKS = ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]
_SCALED_OBJECT = _closed(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=_closed(["apiVersion", "kind", "name"], apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount={"type": "integer", "minimum": 0},
    maxReplicaCount={"type": "integer", "minimum": 1},
    pollingInterval={"type": "integer", "minimum": 1},
    cooldownPeriod={"type": "integer", "minimum": 0},
    fallback=_closed(
        ["failureThreshold", "replicas"],
        failureThreshold={"type": "integer", "minimum": 1},
        replicas={"type": "integer", "minimum": 0},
        behavior={"enum": _FALLBACKS},
    ),
    advanced=_closed([], horizontalPodAutoscalerConfig=_closed(["behavior"], behavior={"type": "object"})),
    triggers=_list(
        {
            **_TRIGGER,
            "if": {"properties": {"type": {"const": "prometheus"}}},
            "then": {"properties": {"metadata": _PROMETHEUS}},
        }
    ),
)
_SPECS = {
    ("inference.networking.k8s.io/v1", "InferencePool"): _POOL,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "PodMonitor"): _closed(
        ["selector", "podMetricsEndpoints"],
        selector=_SELECTOR, namespaceSelector=_NAMESPACES,
        podTargetLabels=_list(_TEXT), podMetricsEndpoints=_list(_ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _closed(
        ["selector", "endpoints"], selector=_SELECTOR, namespaceSelector=_NAMESPACES, endpoints=_list(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ["groups"], groups=_list(_closed(["name", "rules"], name=_TEXT, rules=_list(_ALERT)))
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _closed(
        ["parentRefs", "rules"], parentRefs=_list(_PARENT), hostnames=_list(_TEXT), rules=_list(_ROUTE_RULE)
    ),
}  # fmt: skip


def closed(schema: Any) -> Any:
    """A CRD's structural schema, in which an API server would drop unknown fields, as one that refuses them."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


def check_with_crds(found: dict[str, Any], crds: list[dict[str, Any]]) -> list[str]:
    """What is wrong with it by the projects' own definitions, in words."""
    for crd in crds:
        spec = crd["spec"]
        for version in spec["versions"]:
            if (found["apiVersion"], found["kind"]) == (f"{spec['group']}/{version['name']}", spec["names"]["kind"]):
                schema = closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                errors = jsonschema.Draft202012Validator(schema).iter_errors(found)
                return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    return [f"no CRD for {found['apiVersion']} {found['kind']}"]


def check_custom_resource(found: dict[str, Any]) -> list[str]:
    """What is wrong with it, in words."""
    spec = _SPECS.get((found["apiVersion"], found["kind"]))
    if spec is None:
        return [f"no schema for {found['apiVersion']} {found['kind']}"]
    errors = jsonschema.Draft202012Validator(spec).iter_errors(found["spec"])
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
