{{- /* What a schema cannot say. Each message names what to change. */ -}}
{{- define "pd-cluster.validate" -}}
{{- $roles := include "pd-cluster.roles" . | fromYaml -}}
{{- $full := include "pd-cluster.fullname" . -}}
{{- $kinds := list -}}
{{- $decoding := 0 -}}
{{- $sizes := list -}}
{{- $dtypes := list -}}
{{- range $name, $role := $roles -}}
  {{- $kinds = append $kinds $role.kind -}}
  {{- if has $role.kind (list "decode" "mixed" "pair") -}}
    {{- $decoding = add $decoding (include "pd-cluster.fewestReplicas" $role | int) -}}
  {{- end -}}
  {{- if and (dig "hostNetwork" false $role.extraPodSpec) (not $.Values.networkPolicy.hostNetworkIsClosed) -}}
    {{- fail (printf "roles.%s.extraPodSpec: with hostNetwork the node's control and KV ports are open on the machine's network, where NetworkPolicy does not apply, and what reaches the KV ports can write the node's memory; close %d and %s there, then set networkPolicy.hostNetworkIsClosed" $name (int $.Values.nodePorts.control) $.Values.nodePorts.kv) -}}
  {{- end -}}
  {{- range $node := include "pd-cluster.podNodes" (list $ $role) | fromYamlArray -}}
    {{- $sizes = append $sizes (dig "block-size" 0 $node.args | int) -}}
    {{- $dtypes = append $dtypes (dig "dtype" "auto" $node.args) -}}
    {{- $ranks := dig "tp" (int $node.gpus.count) $node.args | int -}}
    {{- if and $node.gpus.count (ne $ranks (int $node.gpus.count)) -}}
      {{- fail (printf "roles.%s.args.tp: %d ranks, but gpus.count is %d; a rank has one GPU, so leave tp out" $name $ranks (int $node.gpus.count)) -}}
    {{- end -}}
    {{- if and (gt $ranks 1) (lt (include "pd-cluster.bytes" $role.shmSize | float64) 1073741824.0) -}}
      {{- fail (printf "roles.%s.shmSize: %s is too little for the ranks of a node; give them at least 1Gi" $name $role.shmSize) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (eq $role.kind "pair") $role.gpus.count (not $role.gpus.claimTemplate) -}}
    {{- fail (printf "roles.%s.gpus.claimTemplate: GPUs by count are shown to one container alone, and then KV does not take NVLink; name a ResourceClaimTemplate with the GPUs of both nodes" $name) -}}
  {{- end -}}
  {{- include "pd-cluster.validateReplicas" (list (printf "roles.%s" $name) $role) -}}
  {{- if gt (int $role.autoscaling.minReplicas) (int $role.autoscaling.maxReplicas) -}}
    {{- fail (printf "roles.%s.autoscaling: minReplicas (%d) is above maxReplicas (%d)" $name (int $role.autoscaling.minReplicas) (int $role.autoscaling.maxReplicas)) -}}
  {{- end -}}
  {{- if and $role.autoscaling.enabled (eq $role.autoscaling.by "keda") (not $role.autoscaling.keda.prometheus) -}}
    {{- fail (printf "roles.%s.autoscaling.keda.prometheus: name the URL of the server that scrapes the routers" $name) -}}
  {{- end -}}
  {{- if eq $name "router" "pool" "models" "key" "preflight" "test" -}}
    {{- fail (printf "roles.%s: this name is taken by another part of the chart" $name) -}}
  {{- end -}}
  {{- /* a StatefulSet's pods carry its name and 11 characters more in a label of 63 */ -}}
  {{- if gt (add (len $full) (len $name) 1) 52 -}}
    {{- fail (printf "roles.%s: %s-%s is longer than 52 characters, so no pod of it could be made; shorten the role's name, or set fullnameOverride" $name $full $name) -}}
  {{- end -}}
{{- end -}}
{{- if not (or (has "decode" $kinds) (has "mixed" $kinds) (has "pair" $kinds)) -}}
  {{- fail "roles: no role can decode; add one of kind decode, mixed or pair" -}}
{{- end -}}
{{- if eq (int $decoding) 0 -}}
  {{- fail "roles: all roles of kind decode, mixed and pair have 0 replicas, so every request would be refused; give one of them at least 1" -}}
{{- end -}}
{{- if gt (len (uniq $sizes)) 1 -}}
  {{- fail "roles: args.block-size differs; KV moves in blocks, so set it alike in all roles (or in nodeDefaults)" -}}
{{- end -}}
{{- if gt (len (uniq $dtypes)) 1 -}}
  {{- fail "roles: args.dtype differs; KV moves as it is, so set it alike in all roles (or in nodeDefaults)" -}}
{{- end -}}
{{- include "pd-cluster.validateReplicas" (list "router" .Values.router) -}}
{{- with .Values.router.autoscaling -}}
  {{- if gt (int .minReplicas) (int .maxReplicas) -}}
    {{- fail "router.autoscaling: minReplicas is above maxReplicas" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.router -}}
  {{- if and (eq .httpRoute.to "inferencePool") (not .inferencePool.enabled) -}}
    {{- fail "router.httpRoute.to: inferencePool needs router.inferencePool.enabled" -}}
  {{- end -}}
  {{- if and .inferencePool.enabled $.Values.networkPolicy.enabled (not $.Values.networkPolicy.gatewaysFrom) -}}
    {{- fail "router.inferencePool: gateways cannot reach the nodes; name their pods in networkPolicy.gatewaysFrom" -}}
  {{- end -}}
  {{- if and .inferencePool.enabled $.Values.nodeTls.secret -}}
    {{- fail "nodeTls.secret: gateways reach the nodes of an InferencePool by plain HTTP; leave one of the two out" -}}
  {{- end -}}
  {{- if and .inferencePool.enabled (eq (int .port) (int .inferencePool.grpcPort)) -}}
    {{- fail "router.inferencePool.grpcPort: it must differ from router.port" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.model -}}
  {{- if and .existingClaim .claim.create -}}
    {{- fail "model: existingClaim and claim.create exclude each other" -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
  {{- fail "monitoring.podMonitor: Prometheus cannot reach the nodes; name its pods in networkPolicy.metricsFrom" -}}
{{- end -}}
{{- if .Values.pool.enabled -}}
  {{- if not (has .Values.connector (list "nixl" "lmcache")) -}}
    {{- fail (printf "pool: it is for connector nixl or lmcache, not %s" .Values.connector) -}}
  {{- end -}}
  {{- range $name, $role := $roles -}}
    {{- if or (hasKey $role.args "pool-url") (not (dig "prefix-caching" true $role.args)) -}}
      {{- fail (printf "roles.%s.args: the chart's pool sets pool-url, and needs prefix-caching" $name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.nodePorts -}}
  {{- if ne (len (uniq (list (int .http) (int .control) (int .decodeHttp) (int .decodeControl)))) 4 -}}
    {{- fail "nodePorts: http, control, decodeHttp and decodeControl must differ" -}}
  {{- end -}}
{{- end -}}
{{- $kv := splitList "-" .Values.nodePorts.kv -}}
{{- $low := index $kv 0 | int -}}
{{- $high := index $kv 1 | int -}}
{{- if or (lt $low 1024) (gt $low $high) (gt $high 65535) -}}
  {{- fail (printf "nodePorts.kv: %s is no range of ports; write lowest-highest, between 1024 and 65535" .Values.nodePorts.kv) -}}
{{- end -}}
{{- range $name := list "http" "control" "decodeHttp" "decodeControl" -}}
  {{- $port := index $.Values.nodePorts $name | int -}}
  {{- if and (le $low $port) (le $port $high) -}}
    {{- fail (printf "nodePorts.kv: %s contains nodePorts.%s (%d)" $.Values.nodePorts.kv $name $port) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- /* Takes (list where of): `replicas: null` would be 0 pods. */ -}}
{{- define "pd-cluster.validateReplicas" -}}
{{- if not (or (index . 1).autoscaling.enabled (hasKey (index . 1) "replicas")) -}}
{{- fail (printf "%s.replicas: null is no number; to leave it to something else, set autoscaling: {enabled: true, by: external}" (index . 0)) -}}
{{- end -}}
{{- end -}}
