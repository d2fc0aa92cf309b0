"""What values do: the ones that are refused, the key that stays, and the switches."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import helm_python
import pytest
import yaml

from pd_cluster.launch import engine_process, node_process
from tests.deploy import invariants
from tests.deploy.chart import CHART, NAMESPACE, example_values, load_chart, of_kind, one, render
from tests.deploy.fake_api import api_server, render_in_cluster

KEY_PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets/demo-pd-cluster-key"

PICKER = {"router": {"inferencePool": {"enabled": True}}, "networkPolicy": {"enabled": False}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rolez": {}}, "rolez"),
    ({"image": {"tagg": "x"}}, "tagg"),
    ({"image": {"digest": "sha256:123"}}, "digest"),
    ({"roles": {"decode": {"replica": 2}}}, "replica"),
    ({"roles": {"decode": {"kind": "decoder"}}}, "kind"),
    ({"roles": {"Upper": {"kind": "decode"}}}, "Upper"),
    ({"roles": {"decode": {"args": {"port": 9}}}}, "port"),
    ({"nodeDefaults": {"resources": {"limits": {"memory": "lots"}}}}, "memory"),
    ({"router": {"route": "sideways"}}, "route"),
    ({"router": {"httpRoute": {"enabled": True}}}, "parentRefs"),
    ({"env": [{"name": "A"}]}, "env"),
    ({"router": {"envFrom": [{"name": "A"}]}}, "envFrom"),
    ({"nodePorts": {"http": 80}}, "http"),
    ({"nodeDefaults": {"podLabels": {"pd-cluster/part": "router"}}}, "pd-cluster/part"),
    ({"router": {"podLabels": {"app.kubernetes.io/instance": "x"}}}, "app.kubernetes.io/instance"),
    ({"nodeDefaults": {"extraPodSpec": {"containers": []}}}, "containers"),
    ({"nodeDefaults": {"kind": "decode"}}, "kind"),
    ({"roles": {"decode": None}}, "no role can decode"),
    ({"roles": {"router": {"kind": "decode"}}}, "name is taken"),
    ({"roles": {"decode": {"args": {"block-size": 32}}}}, "block-size differs"),
    ({"roles": {"prefill": {"args": {"dtype": "float16"}}}}, "dtype differs"),
    ({"roles": {"decode": {"autoscaling": {"minReplicas": 5}}}}, "is above maxReplicas"),
    ({"router": {"autoscaling": {"minReplicas": 9}}}, "is above maxReplicas"),
    ({"model": {"existingClaim": "a", "claim": {"create": True}}}, "exclude each other"),
    ({"monitoring": {"podMonitor": {"enabled": True}}}, "networkPolicy.metricsFrom"),
    ({"nodePorts": {"http": 8100, "control": 8100}}, "must differ"),
    ({"nodePorts": {"http": 8102}}, "must differ"),
    ({"nodePorts": {"kv": "8103-8200"}}, "contains nodePorts.decodeControl"),
    ({"roles": {"decode": {"gpus": {"count": 2}, "args": {"tp": 4}}}}, "4 ranks, but gpus.count is 2"),
    ({"roles": {"decode": {"gpus": {"count": 2}, "args": {"tp": 1}}}}, "leave tp out"),
    ({"roles": {"decode": {"gpus": {"count": 2}, "shmSize": "512Mi"}}}, "shmSize: 512Mi is too little"),
    ({"roles": {"decode": {"args": {"tp": 2}, "shmSize": "1G"}}}, "shmSize: 1G is too little"),
    ({"roles": {"host": {"kind": "pair", "gpus": {"count": 1}}}}, "roles.host.gpus.claimTemplate"),
    ({"roles": {"host": {"kind": "pair", "pair": {"decode": {"gpus": {"count": 2}}}, "shmSize": "1Mi"}}}, "too little"),
    ({"roles": {"host": {"kind": "pair", "pair": {"decode": {"args": {"block-size": 32}}}}}}, "block-size differs"),
    ({"roles": {"host": {"kind": "pair", "pair": {"mixed": {}}}}}, "mixed"),
    ({"roles": {"host": {"kind": "pair", "replicas": 0}, "decode": None}}, "0 replicas"),
    ({"roles": {"pool": {"kind": "decode"}}}, "name is taken"),
    ({"nodePorts": {"kv": "45000"}}, "kv"),
    ({"nodePorts": {"kv": "45099-45000"}}, "45099-45000 is no range"),
    ({"nodePorts": {"kv": "45000-99999"}}, "between 1024 and 65535"),
    ({"nodePorts": {"kv": "8000-8100"}}, "contains nodePorts.http"),
    ({"roles": {"decode": {"args": {"kv-ports": "1-2"}}}}, "kv-ports"),
    ({"roles": {"decode": {"extraPodSpec": {"hostNetwork": True}}}}, "hostNetworkIsClosed"),
    ({"nodeDefaults": {"extraPodSpec": {"hostNetwork": True}}}, "8101 and 45000-45099"),
    ({"roles": {"decode": {"replicas": 0}}}, "0 replicas"),
    ({"roles": {"decode": {"replicas": 0}, "both": {"kind": "mixed", "replicas": 0}}}, "0 replicas"),
    ({"nodeDefaults": {"podLabels": {"team": "x" * 64}}}, "team"),
    ({"router": {"podLabels": {"team": "x" * 64}}}, "team"),
    ({"pool": {"podLabels": {"team": "no blanks"}}}, "team"),
    ({"roles": {"decode": {"podLabels": {"x" * 64: "y"}}}}, "x" * 64),
    ({"router": {"inferencePool": {"enabled": True}}}, "networkPolicy.gatewaysFrom"),
    ({"router": {"inferencePool": {"enabled": True, "grpcPort": 8000}}, "networkPolicy": {"enabled": False}}, "differ"),
    ({"router": {"inferencePool": {"grpcPort": 80}}}, "grpcPort"),
    ({"router": {"args": {"api-keys": "x"}}}, "api-keys"),
    ({"router": {"args": {"otlp-url": "http://c:4318"}}}, "otlp-url"),
    ({"router": {"tracing": {"otlpUrl": "collector:4318"}}}, "otlpUrl"),
    ({"router": {"tracing": {"ratio": 2}}}, "ratio"),
    ({"router": {"requestLog": {"level": "loud"}}}, "level"),
    ({"router": {"args": {"allowed-origins": [1]}}}, "allowed-origins"),
    ({"nodeDefaults": {"args": {"tls-cert": "/x"}}}, "tls-cert"),
    ({"nodeTls": {"secret": "a", "name": "no blanks"}}, "name"),
    ({"slo": {"ttftMs": -1}}, "ttftMs"),
    (PICKER | {"nodeTls": {"secret": "a"}}, "nodeTls.secret: gateways"),
    ({"router": {"httpRoute": {"to": "inferencePool"}}}, "needs router.inferencePool"),
    ({"nodeDefaults": {"autoscaling": {"enabled": True, "by": "keda"}}}, "keda.prometheus"),
    ({"nodeDefaults": {"autoscaling": {"by": "vpa"}}}, "by"),
    ({"pool": {"enabled": True, "maxGB": 0}}, "maxGB"),
    ({"pool": {"enabled": True}, "connector": "loopback"}, "not loopback"),
    ({"pool": {"enabled": True}, "nodeDefaults": {"args": {"pool-url": "lm://x:1"}}}, "sets pool-url"),
    ({"pool": {"enabled": True}, "nodeDefaults": {"args": {"prefix-caching": False}}}, "needs prefix-caching"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[row[1] + str(i) for i, row in enumerate(REFUSED)])
def test_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


def test_schema_describes_every_default() -> None:
    """values.yaml and the schema list the same names, at every depth."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    missing: list[str] = []

    def compare(value: Any, rule: dict[str, Any], path: str) -> None:
        without = {name for name, inner in rule.get("properties", {}).items() if inner is False}
        for part in (rule, *rule.get("allOf", [])):
            if "$ref" in part:
                rule = schema["$defs"][part["$ref"].rsplit("/", 1)[1]]
        if isinstance(value, dict) and value and "properties" in rule:  # {} takes what another map has
            missing.extend(
                f"{path}.{name} has no default"
                for name in rule["properties"].keys() - value.keys() - without - {"global"}
            )
            missing.extend(f"{path}.{name} is not in the schema" for name in value.keys() - rule["properties"].keys())
            for name in value.keys() & rule["properties"].keys():
                compare(value[name], rule["properties"][name], f"{path}.{name}")

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    compare(defaults, schema, "")
    assert missing == []


def nodes_of(objects: list[dict[str, Any]], role: str) -> list[list[str]]:
    containers: list[dict[str, Any]] = one(objects, "StatefulSet", f"-{role}")["spec"]["template"]["spec"]["containers"]
    return [container["args"] for container in containers]


def test_ranks_follow_from_the_gpus() -> None:
    objects = render({"roles": {"decode": {"gpus": {"count": 4}}, "prefill": {"gpus": {"count": 1}}}})
    assert "--tp=4" in nodes_of(objects, "decode")[0]
    assert not any(argument.startswith("--tp") for argument in nodes_of(objects, "prefill")[0])
    container = one(objects, "StatefulSet", "-decode")["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert one(objects, "PodDisruptionBudget", "-decode")["spec"]["maxUnavailable"] == 1
    on_cpus = render({"nodeDefaults": {"args": {"tp": 2}, "shmSize": "1Gi"}})
    assert [argument for argument in nodes_of(on_cpus, "decode")[0] if argument.startswith("--tp")] == ["--tp=2"]


def test_a_pair_is_two_nodes_that_see_each_other() -> None:
    pair = {"kind": "pair", "gpus": {"count": 1, "claimTemplate": "gpus"}, "pair": {"decode": {"gpus": {"count": 2}}}}
    objects = render({"roles": {"prefill": None, "decode": None, "host": pair}})
    spec = one(objects, "StatefulSet", "-host")["spec"]["template"]["spec"]
    assert spec["shareProcessNamespace"] is True
    assert spec["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
    prefill, decode = spec["containers"]
    assert (prefill["args"][0], decode["args"][0]) == ("prefill", "decode")
    assert "--tp=2" in decode["args"]
    for container, devices in ((prefill, "0"), (decode, "1,2")):
        assert container["resources"]["claims"] == [{"name": "gpus"}], "both are shown all GPUs of the pod"
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
        assert {"name": "CUDA_VISIBLE_DEVICES", "value": devices} in container["env"]
    assert invariants.ports(objects) == invariants.router_knows_nodes(objects) == []


def test_only_pairs_share_their_processes() -> None:
    objects = render({"roles": {"decode": {"gpus": {"count": 2, "claimTemplate": "two"}}}})
    spec = one(objects, "StatefulSet", "-decode")["spec"]["template"]["spec"]
    assert "shareProcessNamespace" not in spec
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert not any(entry["name"] == "CUDA_VISIBLE_DEVICES" for entry in spec["containers"][0]["env"])


def test_upgrade_keeps_the_key() -> None:
    [made] = of_kind(render(), "Secret")
    asked: list[str] = []
    with api_server({KEY_PATH: made}, asked) as url:
        upgraded = render_in_cluster(url)
    assert KEY_PATH in asked
    assert one(upgraded, "Secret", "-key")["data"] == made["data"]


def test_install_makes_a_key_when_the_cluster_has_none() -> None:
    asked: list[str] = []
    with api_server({}, asked) as url:
        first, second = (one(render_in_cluster(url), "Secret", "-key")["data"]["cluster-key"] for _ in range(2))
    assert KEY_PATH in asked
    assert first != second
    assert len(first) >= 64


def test_own_key_secret_is_mounted_and_none_is_made() -> None:
    objects = render({"clusterKey": {"existingSecret": "mine", "key": "k"}})
    assert of_kind(objects, "Secret") == []
    volume = one(objects, "StatefulSet", "decode")["spec"]["template"]["spec"]["volumes"][0]
    assert volume["secret"]["secretName"] == "mine"
    assert volume["secret"]["items"] == [{"key": "k", "path": "cluster-key"}]


def test_drain_leaves_the_time_to_stop_an_engine() -> None:
    """The chart's margin covers what a node does after its drain."""
    spec = one(render(), "StatefulSet", "decode")["spec"]["template"]["spec"]
    margin = spec["terminationGracePeriodSeconds"] - 5 - 60  # preStop and drain of values.yaml
    assert margin >= engine_process.ENGINE_STOP_S + 2 * node_process.FLUSH_S


def test_pod_reader_gives_the_router_its_role_and_nothing_more() -> None:
    without = render({"router": {"podReader": False}})
    assert of_kind(without, "Role", "RoleBinding", "ClusterRole") == []
    assert invariants.router_knows_nodes(without) == ["the router may not read pods"]
    objects = render()
    assert of_kind(objects, "ClusterRole") == []
    [role] = of_kind(objects, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    [binding] = of_kind(objects, "RoleBinding")
    [account] = of_kind(objects, "ServiceAccount")
    router = one(objects, "Deployment", "router")["spec"]["template"]["spec"]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"] == router["serviceAccountName"]
    assert router["automountServiceAccountToken"] is True
    assert invariants.hardening(objects) == []


def test_preflight_waits_for_no_other_pod() -> None:
    """It runs before the pods that a role's pod affinity names, and before the key and the claim of the chart."""
    values = example_values("one-gpu-host")
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    values["nodeDefaults"]["affinity"]["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    jobs = of_kind(render(values), "Job")
    assert len(jobs) == 2
    for job in jobs:
        spec = job["spec"]["template"]["spec"]
        assert list(spec["affinity"]) == ["nodeAffinity"]
        assert {volume["name"] for volume in spec["volumes"]} == {"shm", "tmp"}
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert not any(argument.startswith("--model") for argument in spec["containers"][0]["args"])


def test_digest_wins_over_tag() -> None:
    digest = "sha256:" + "0" * 64
    objects = render({"image": {"repository": "r", "tag": "t", "digest": digest}})
    images = {part["image"] for part in one(objects, "StatefulSet", "decode")["spec"]["template"]["spec"]["containers"]}
    assert images == {f"r@{digest}"}


@pytest.mark.parametrize("values", [
    {"roles": {"decode": {"replicas": 0}, "both": {"kind": "mixed", "replicas": 1}}},
    {"roles": {"decode": {"replicas": 0, "autoscaling": {"enabled": True}}}},
    {"roles": {"prefill": {"replicas": 0}}},
], ids=["mixed", "autoscaled", "no prefill"])  # fmt: skip
def test_a_role_may_be_empty_while_another_decodes(values: dict[str, Any]) -> None:
    assert invariants.selectors(render(values)) == []


def test_labels_of_63_characters_are_taken() -> None:
    labels = {"team": "x" * 63, "example.com/" + "y" * 63: "", "a": "b_c.D-9"}
    found = one(render({"nodeDefaults": {"podLabels": labels}}), "StatefulSet", "decode")
    assert labels.items() <= found["spec"]["template"]["metadata"]["labels"].items()


def test_host_network_needs_a_word_that_it_is_closed() -> None:
    closed = {"nodeDefaults": {"extraPodSpec": {"hostNetwork": True}}, "networkPolicy": {"hostNetworkIsClosed": True}}
    assert one(render(closed), "StatefulSet", "decode")["spec"]["template"]["spec"]["hostNetwork"] is True
    with load_chart() as chart:
        notes = chart.render(closed, name="demo", namespace=NAMESPACE)["pd-cluster/templates/NOTES.txt"]
    assert "does not check" in notes


def test_kv_ports_are_one_range_for_process_and_policy() -> None:
    objects = render({"nodePorts": {"kv": "30000-30009"}})
    assert invariants.ports(objects) == invariants.node_network(objects) == []
    node = one(objects, "StatefulSet", "decode")["spec"]["template"]["spec"]["containers"][0]
    assert "--kv-ports=30000-30009" in node["args"]


def test_mooncakes_segments_are_reached_from_nodes_only() -> None:
    objects = render({"connector": "mooncake", "nodeDefaults": {"args": {"pool-url": "mooncake://m:50051"}}})
    nodes, others = one(objects, "NetworkPolicy", "nodes")["spec"]["ingress"]
    assert "ports" not in nodes
    assert [peer["podSelector"]["matchLabels"]["pd-cluster/part"] for peer in nodes["from"]] == ["node"]
    assert [port["port"] for port in others["ports"]] == ["http"]


def test_an_operators_ucx_settings_reach_the_nodes() -> None:
    env = [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}]
    for values in ({"env": env}, {"nodeDefaults": {"env": env}}):
        node = one(render(values), "StatefulSet", "decode")["spec"]["template"]["spec"]["containers"][0]
        assert [found for found in node["env"] if found["name"].startswith("UCX_")] == env


def test_only_the_cluster_reaches_kv_and_control_ports() -> None:
    """What is no node of this release reaches the HTTP port at most."""
    [policy] = [found for found in of_kind(render(), "NetworkPolicy") if found["metadata"]["name"].endswith("-nodes")]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    for rule in policy["spec"]["ingress"]:
        peers = rule["from"]
        assert all(peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo" for peer in peers)
        more_than_http = [port["port"] for port in rule["ports"]] != ["http"]
        parts = [peer["podSelector"]["matchLabels"]["pd-cluster/part"] for peer in peers]
        assert parts == ["node"] if more_than_http else parts == ["router"]


@pytest.mark.parametrize(("example", "kind"), [("autoscaling", "Ingress"), ("xpyd-rdma", "HTTPRoute")])
def test_the_public_sees_the_api_only(example: str, kind: str) -> None:
    [rule] = of_kind(render(example_values(example)), kind)[0]["spec"]["rules"]
    matches = rule["http"]["paths"] if kind == "Ingress" else [match["path"] for match in rule["matches"]]
    key = "path" if kind == "Ingress" else "value"
    assert [match[key] for match in matches] == ["/v1", "/tokenize", "/detokenize", "/health"]


def test_a_pool_is_there_only_when_it_is_asked_for() -> None:
    assert not [found for found in render() if found["metadata"]["name"].endswith("-pool")]
    objects = [found for found in render({"pool": {"enabled": True}}) if found["metadata"]["name"].endswith("-pool")]
    assert sorted(found["kind"] for found in objects) == ["Deployment", "NetworkPolicy", "Service"]
    [check, _] = of_kind(render({"pool": {"enabled": True}, "preflight": {"enabled": True}}), "Job")
    assert "--connector=lmcache" in check["spec"]["template"]["spec"]["containers"][0]["args"]
    elsewhere = {"connector": "mooncake", "nodeDefaults": {"args": {"pool-url": "mooncake://m:50051"}}}
    given = one(render(elsewhere), "StatefulSet", "decode")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--connector=mooncake", "--pool-url=mooncake://m:50051"} <= set(given)


def test_an_alert_can_be_left_out() -> None:
    on = {"monitoring": {"prometheusRule": {"enabled": True}}}
    off = {"monitoring": {"prometheusRule": {"enabled": True, "except": ["PdNodeDown"]}}}
    counts = [
        sum(len(group["rules"]) for group in one(render(v), "PrometheusRule", "")["spec"]["groups"]) for v in (on, off)
    ]
    assert counts[0] == counts[1] + 1


def test_flags_keep_their_types() -> None:
    args = {"max-model-len": 1048576, "gpu-memory-utilization": 0.85, "prefix-caching": False, "dtype": "bfloat16"}
    objects = render({"nodeDefaults": {"args": args}})
    given = one(objects, "StatefulSet", "decode")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert given[-4:] == [
        "--dtype=bfloat16", "--gpu-memory-utilization=0.85", "--max-model-len=1048576", "--no-prefix-caching",
    ]  # fmt: skip


def test_flags_that_the_chart_owns_are_the_ones_it_sets() -> None:
    """A flag cannot be given twice: the schema forbids in args what the template writes."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    router = {"apiKeys": {"secret": "a"}, "tlsSecret": "b", "tracing": {"otlpUrl": "http://c:4318"}}
    picker = {"inferencePool": {"enabled": True, "tlsSecret": "c"}}  # excludes TLS at nodes
    values = {"model": {"id": "/models/x", "servedName": "y"}, "router": router, "networkPolicy": {"enabled": False}}
    values |= {"slo": {"ttftMs": 400, "tpotMs": 15, "itlMs": 50}}
    both = [render(values | {"nodeTls": {"secret": "d"}}), render(values | {"router": router | picker})]
    for kind, name, rule in (("StatefulSet", "decode", "nodeFlags"), ("Deployment", "router", "routerFlags")):
        arguments = [
            argument
            for objects in both
            for argument in one(objects, kind, name)["spec"]["template"]["spec"]["containers"][0]["args"]
        ]
        written = {argument.partition("=")[0].removeprefix("--") for argument in arguments if argument.startswith("--")}
        forbidden = set(schema["$defs"][rule]["propertyNames"]["not"]["enum"])
        assert written <= forbidden
        assert forbidden - written <= {
            "role",
            "advertise-host",
            "prefill",
            "decode",
            "mixed",
        }  # set through the environment, or by other roles


def test_role_names_and_release_names_fit_together() -> None:
    name = "a-release-name-of-fifty-three-characters-is-the-most"
    assert invariants.names(render(name=name)) == []
    assert invariants.names(render({"roles": {"prefill-for": {"kind": "mixed"}}}, name=name)) == []
    with pytest.raises(helm_python.HelmError, match="longer than 52 characters"):
        render({"roles": {"prefill-four": {"kind": "mixed"}}}, name=name)


def test_dataclass_of_flags_is_what_the_parser_has() -> None:
    from pd_cluster.config import NodeConfig

    known = {item.name.replace("_", "-") for kind in NodeConfig.sections().values() for item in fields(kind)}
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["$defs"]["nodeFlags"]["propertyNames"]["not"]["enum"]) <= known


def test_secrets_of_the_router_are_mounted_and_named_by_flags() -> None:
    given = {
        "apiKeys": {"secret": "keys"}, "tlsSecret": "public",
        "inferencePool": {"enabled": True, "tlsSecret": "picker"},
    }  # fmt: skip
    objects = render({
        "router": given, "networkPolicy": {"enabled": False}, "monitoring": {"serviceMonitor": {"enabled": True}},
        "test": {"apiKey": {"secret": "mine"}},
    })  # fmt: skip
    pod = one(objects, "Deployment", "-router")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
    files = [argument.partition("=")[2] for argument in container["args"] if "=/etc/" in argument]
    named = {file: volumes[mounts[file.rpartition("/")[0]]] for file in files}
    assert named.pop("/etc/pd-cluster/cluster-key")
    assert named == {
        "/etc/pd-api-keys/keys.jsonl": "keys",
        "/etc/pd-tls/tls.crt": "public", "/etc/pd-tls/tls.key": "public",
        "/etc/pd-picker-tls/tls.crt": "picker", "/etc/pd-picker-tls/tls.key": "picker",
    }  # fmt: skip
    assert {container[name]["httpGet"]["scheme"] for name in container if name.endswith("Probe")} == {"HTTPS"}
    ports = {port["name"]: port["appProtocol"] for port in one(objects, "Service", "-router")["spec"]["ports"]}
    assert ports == {"http": "https", "grpc": "https"}
    assert one(objects, "ServiceMonitor", "-router")["spec"]["endpoints"][0]["scheme"] == "https"
    [asking] = one(objects, "Pod", "-test")["spec"]["containers"]
    assert asking["args"][0].startswith("https://")
    assert asking["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "key"}


@pytest.mark.parametrize(
    ("kind", "figures"),
    [
        ("prefill", ["queued_tokens"]),
        ("decode", ["sequences"]),
        ("mixed", ["queued_tokens", "sequences"]),
        ("pair", ["queued_tokens", "sequences"]),
    ],
)
def test_keda_scales_each_kind_by_its_own_figures(kind: str, figures: list[str]) -> None:
    autoscaling = {"enabled": True, "by": "keda", "keda": {"prometheus": "http://p:9090"}}
    objects = render({"roles": {"own": {"kind": kind, "autoscaling": autoscaling}}})
    queries = [trigger["metadata"]["query"] for trigger in one(objects, "ScaledObject", "-own")["spec"]["triggers"]]
    nodes = 'namespace="llm",node=~"demo-pd-cluster-own-[0-9]+(-decode)?"'
    assert queries == [f"sum(max by (node) (pd_router_node_{figure}{{{nodes}}}))" for figure in figures]
    assert of_kind(objects, "HorizontalPodAutoscaler") == []
