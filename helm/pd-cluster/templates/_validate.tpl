{{- /* Before anything else: what is wrong may break the templates, with an error that is no sentence. Helm begins with
       templates/tests, and all templates have one root. */ -}}
{{- define "pd-cluster.validateOnce" -}}
{{- if not (hasKey . "validated") }}{{ include "pd-cluster.validate" . }}{{ $_ := set . "validated" true }}{{ end -}}
{{- end -}}

{{- /* What a schema cannot say. Each message names what to change. */ -}}
{{- define "pd-cluster.validate" -}}
{{- range $part := list "router" "nodeDefaults" -}}
  {{- if not (get $.Values $part).serviceAccount -}}
    {{- fail (printf "%s.serviceAccount: it is missing. Either it is null, which takes the default out: leave it out. Or the values are of an earlier version, as helm upgrade --reuse-values keeps them: use --reset-then-reuse-values, or give your files again" $part) -}}
  {{- end -}}
{{- end -}}
{{- include "pd-cluster.validateAround" . -}}
{{- $roles := include "pd-cluster.roles" . | fromJson -}}
{{- $full := include "pd-cluster.fullname" . -}}
{{- $routerAccount := include "pd-cluster.account" (list .Values.router.serviceAccount (printf "%s-router" $full)) -}}
{{- $kinds := list -}}
{{- $decoding := 0 -}}
{{- $sizes := list -}}
{{- $dtypes := list -}}
{{- range $name, $role := $roles -}}
  {{- $kinds = append $kinds $role.kind -}}
  {{- if has $role.kind (list "decode" "mixed" "pair") -}}
    {{- $decoding = add $decoding (include "pd-cluster.fewestReplicas" $role | int) -}}
  {{- end -}}
  {{- include "pd-cluster.checkExtras" (list (printf "roles.%s" $name) $role $.Values.nodeDefaults.serviceAccount.create) -}}
  {{- $strategy := default dict $role.updateStrategy -}}
  {{- if and (eq (default "" $strategy.type) "OnDelete") $strategy.rollingUpdate -}}
    {{- fail (printf "roles.%s.updateStrategy: rollingUpdate is for type RollingUpdate; with OnDelete leave it out" $name) -}}
  {{- end -}}
  {{- if and $.Values.router.serviceAccount.create (eq (include "pd-cluster.account" (list $role.serviceAccount (printf "%s-%s" $full $name))) $routerAccount) -}}
    {{- fail (printf "roles.%s.serviceAccount: %s is the router's account, which may list pods; name another" $name $routerAccount) -}}
  {{- end -}}
  {{- if and (dig "hostNetwork" false (default dict $role.extraPodSpec)) (not $.Values.networkPolicy.hostNetworkIsClosed) -}}
    {{- fail (printf "roles.%s.extraPodSpec: with hostNetwork the node's control and KV ports are open on the machine's network, where NetworkPolicy does not apply, and what reaches the KV ports can write the node's memory; close %d and %s there, then set networkPolicy.hostNetworkIsClosed" $name (int $.Values.nodePorts.control) $.Values.nodePorts.kv) -}}
  {{- end -}}
  {{- $folder := "" -}}
  {{- range $node := include "pd-cluster.podNodes" (list $ $role) | fromJsonArray -}}
    {{- $sizes = append $sizes (dig "block-size" 0 $node.args | int) -}}
    {{- $dtypes = append $dtypes (dig "dtype" "auto" $node.args) -}}
    {{- $ranks := dig "tp" (int $node.gpus.count) $node.args | int -}}
    {{- if and $node.gpus.count (ne $ranks (int $node.gpus.count)) -}}
      {{- fail (printf "roles.%s.args.tp: %d ranks, but gpus.count is %d; a rank has one GPU, so leave tp out" $name $ranks (int $node.gpus.count)) -}}
    {{- end -}}
    {{- if and (gt $ranks 1) (lt (include "pd-cluster.bytes" $role.shmSize | float64) 1073741824.0) -}}
      {{- fail (printf "roles.%s.shmSize: %s is too little for the ranks of a node; give them at least 1Gi" $name (toString $role.shmSize)) -}}
    {{- end -}}
    {{- include "pd-cluster.validateTiers" (list (printf "roles.%s.args" $name) $node.args $ranks) -}}
    {{- $disk := dig "disk-cache-dir" "" $node.args -}}
    {{- if and $disk (eq $disk $folder) -}}
      {{- fail (printf "roles.%s.args.disk-cache-dir: both nodes of the pair have %s, and a directory is one node's; give the decode node another in pair.decode.args" $name $disk) -}}
    {{- end -}}
    {{- $folder = $disk -}}
  {{- end -}}
  {{- if and (eq $role.kind "pair") $role.gpus.count (not $role.gpus.claimTemplate) -}}
    {{- fail (printf "roles.%s.gpus.claimTemplate: GPUs by count are shown to one container alone, and then KV does not take NVLink; name a ResourceClaimTemplate with the GPUs of both nodes" $name) -}}
  {{- end -}}
  {{- if or (hasKey (default dict $role.resources.limits) $role.gpus.resource) (hasKey (default dict $role.resources.requests) $role.gpus.resource) -}}
    {{- fail (printf "roles.%s.resources: the chart writes %s; set gpus.count, from which the device and the ranks follow" $name $role.gpus.resource) -}}
  {{- end -}}
  {{- include "pd-cluster.validateReplicas" (list (printf "roles.%s" $name) $role) -}}
  {{- if gt (int $role.autoscaling.minReplicas) (int $role.autoscaling.maxReplicas) -}}
    {{- fail (printf "roles.%s.autoscaling: minReplicas (%d) is above maxReplicas (%d)" $name (int $role.autoscaling.minReplicas) (int $role.autoscaling.maxReplicas)) -}}
  {{- end -}}
  {{- if eq $name "router" "pool" "balance" "models" "key" "preflight" "test" -}}
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
{{- if .Values.balance.enabled -}}
  {{- range $name, $role := $roles -}}
    {{- if $role.autoscaling.enabled -}}
      {{- fail (printf "balance.enabled: roles.%s.autoscaling sets the number of pods by their role at the start, and the balance changes roles; leave one of the two out" $name) -}}
    {{- end -}}
  {{- end -}}
  {{- if not (and .Values.slo.ttftMs .Values.slo.tpotMs) -}}
    {{- fail "balance.enabled: it predicts how many requests meet their targets; set slo.ttftMs and slo.tpotMs" -}}
  {{- end -}}
  {{- if .Values.router.tlsSecret -}}
    {{- fail "balance.enabled: it asks each router by its pod's address, which router.tlsSecret does not name; run pd-cluster balance --tls-ca yourself, or leave one of the two out" -}}
  {{- end -}}
{{- end -}}
{{- include "pd-cluster.validateReplicas" (list "router" .Values.router) -}}
{{- with .Values.router.autoscaling -}}
  {{- if gt (int .minReplicas) (int .maxReplicas) -}}
    {{- fail "router.autoscaling: minReplicas is above maxReplicas" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.router -}}
  {{- include "pd-cluster.checkExtras" (list "router" . false) -}}
  {{- $strategy := default dict .strategy -}}
  {{- if and (eq (default "" $strategy.type) "Recreate") $strategy.rollingUpdate -}}
    {{- fail "router.strategy: rollingUpdate is for type RollingUpdate; with Recreate leave it out" -}}
  {{- end -}}
  {{- if and .podReader (has $routerAccount (list "" "default")) -}}
    {{- fail "router.serviceAccount.name: the Role that lets the router read pods would go to the namespace's default account, and so to all pods in it; name an account, or set podReader to false" -}}
  {{- end -}}
  {{- if and (dig "hostNetwork" false (default dict .extraPodSpec)) (not $.Values.networkPolicy.hostNetworkIsClosed) -}}
    {{- fail "router.extraPodSpec: with hostNetwork its ports are open on the machine's network, where NetworkPolicy does not apply; close them there, then set networkPolicy.hostNetworkIsClosed" -}}
  {{- end -}}
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
  {{- $sources := compact (list (empty .existingClaim | ternary "" "existingClaim") (empty .claim.create | ternary "" "claim.create") (empty .volume | ternary "" "volume")) -}}
  {{- if gt (len $sources) 1 -}}
    {{- fail (printf "model: %s exclude each other" (join " and " $sources)) -}}
  {{- end -}}
  {{- if regexMatch "^/|(^|/)[.][.](/|$)" (default "" .subPath) -}}
    {{- fail (printf "model.subPath: %s is no path inside the volume; write it without a leading / and without .." .subPath) -}}
  {{- end -}}
  {{- if and .subPath (not $sources) -}}
    {{- fail "model.subPath: a new emptyDir has no directories; name the volume in existingClaim or volume" -}}
  {{- end -}}
  {{- $id := default "" .id -}}
  {{- $scheme := regexFind "^[a-zA-Z][-+.a-zA-Z0-9]*://" $id | trimSuffix "://" | lower -}}
  {{- if $scheme -}}
    {{- $advice := dict "hf" "write the hub id without hf://" "oci" "mount the image: model.volume {image: {reference: ...}}, and the directory in model.id" "pvc" "name the claim in model.existingClaim, and the directory under /models in model.id" -}}
    {{- fail (printf "model.id: nodes read directories and hub ids, not %s://; %s" $scheme (get $advice $scheme | default "fetch it by nodeDefaults.initContainers or mount it by model.volume (csi), and name its directory under /models")) -}}
  {{- end -}}
  {{- $isHub := and (contains "/" $id) (not (hasPrefix "/" $id)) -}}
  {{- range $name, $role := ternary $roles dict (eq (include "pd-cluster.modelReadOnly" $) "true") -}}
    {{- $all := include "pd-cluster.podOf" (list $ $role $name) | fromJson -}}
    {{- $given := default list $all.envFrom -}}
    {{- range $all.env -}}{{- if has .name (list "HF_HOME" "HF_HUB_CACHE") -}}{{- $given = append $given . -}}{{- end -}}{{- end -}}
    {{- if and $isHub (not $given) -}}
      {{- fail (printf "model.id: %s is of the hub, and nothing can be downloaded to a read-only volume; name its directory under /models, or the hub's cache there by HF_HUB_CACHE and HF_HUB_OFFLINE in env" $.Values.model.id) -}}
    {{- end -}}
    {{- if and $.Values.model.id (not $sources) (not $role.initContainers) -}}
      {{- fail (printf "model.readOnly: a new emptyDir is empty, and nodes of role %s cannot write it; name a volume, or what fills it in initContainers" $name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.podSecurityContext -}}
  {{- if and (not (hasKey . "fsGroup")) .runAsGroup -}}
    {{- fail (printf "podSecurityContext.fsGroup: without one, group %d cannot read the mounted Secrets; set it, or take runAsGroup out too, for the platform to choose both" (int .runAsGroup)) -}}
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
{{- /* What a node refuses at its start of its tiers in host memory and on disk, and sizes that the pod's memory cannot
       follow. Takes (list path args ranks). */ -}}
{{- define "pd-cluster.validateTiers" -}}
{{- $path := index . 0 -}}
{{- $args := index . 1 -}}
{{- range $flag := list "host-cache-gb" "swap-gb" "disk-cache-gb" -}}
  {{- if not (regexMatch "^([0-9]+[.]?[0-9]*|[.][0-9]+)(e[-+]?[0-9]+)?$" (dig $flag 0 $args | toString)) -}}
    {{- fail (printf "%s.%s: %s is no size; write a number of GB, 0 or more, without its unit" $path $flag (get $args $flag | toString)) -}}
  {{- end -}}
{{- end -}}
{{- $host := dig "host-cache-gb" 0 $args | float64 -}}
{{- if and $host (not (dig "prefix-caching" true $args)) -}}
  {{- fail (printf "%s.host-cache-gb: it keeps prefixes, of which prefix-caching false has none; leave one of the two out, or set swap-gb for preempted sequences" $path) -}}
{{- end -}}
{{- if not (dig "disk-cache-dir" "" $args) -}}
  {{- if hasKey $args "disk-cache-gb" -}}
    {{- fail (printf "%s.disk-cache-gb: without disk-cache-dir there are no files; set that too, or leave this out" $path) -}}
  {{- end -}}
{{- else if not $host -}}
  {{- fail (printf "%s.disk-cache-dir: its blocks go through host memory; set host-cache-gb too" $path) -}}
{{- else if gt (int (index . 2)) 1 -}}
  {{- fail (printf "%s.disk-cache-dir: it serves nodes of one rank, and this one has %d; leave it out" $path (index . 2)) -}}
{{- end -}}
{{- end -}}

{{- /* Takes (list where of): `replicas: null` would be 0 pods. */ -}}
{{- define "pd-cluster.validateReplicas" -}}
{{- if not (or (index . 1).autoscaling.enabled (hasKey (index . 1) "replicas")) -}}
{{- fail (printf "%s.replicas: null is no number; to leave it to something else, set autoscaling: {enabled: true, by: external}" (index . 0)) -}}
{{- end -}}
{{- end -}}

{{- /* The fields of a pod and its container that have a value of their own. */ -}}
{{- define "pd-cluster.ownedFields" -}}
extraPodSpec:
  affinity: affinity
  containers: extraContainerSpec
  imagePullSecrets: imagePullSecrets at the top
  initContainers: initContainers
  nodeSelector: nodeSelector
  priorityClassName: priorityClassName
  restartPolicy: Always, which is the only one
  runtimeClassName: runtimeClassName
  serviceAccount: serviceAccount.name
  serviceAccountName: serviceAccount.name
  terminationGracePeriodSeconds: preStopSeconds and drainSeconds
  tolerations: tolerations
  topologySpreadConstraints: topologySpread
  volumes: extraVolumes
extraContainerSpec:
  args: args
  env: env
  envFrom: envFrom
  image: image
  imagePullPolicy: image.pullPolicy
  name: the chart's, which probes and logs are found by
  ports: nodePorts and router.port
  volumeMounts: extraVolumeMounts
{{- end -}}

{{- /* Refuses fields in extra* that have a value of their own, and annotations of an account that is not made, unless
       they are of another's. Takes (list path settings whether-another-is-made). */ -}}
{{- define "pd-cluster.checkExtras" -}}
{{- $path := index . 0 -}}
{{- $settings := index . 1 -}}
{{- range $part, $fields := include "pd-cluster.ownedFields" . | fromYaml -}}
  {{- range $field, $value := $fields -}}
    {{- if hasKey (get $settings $part | default dict) $field -}}
      {{- fail (printf "%s.%s.%s: the chart writes this field; use %s" $path $part $field $value) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if dig "lifecycle" "preStop" "" (default dict $settings.extraContainerSpec) -}}
  {{- fail (printf "%s.extraContainerSpec.lifecycle.preStop: the chart writes this field; use preStopSeconds" $path) -}}
{{- end -}}
{{- if and $settings.serviceAccount.annotations (not (or $settings.serviceAccount.create (index . 2))) -}}
  {{- fail (printf "%s.serviceAccount.annotations: they are for an account that the chart makes; set create, or annotate %s yourself" $path (default "the account" $settings.serviceAccount.name)) -}}
{{- end -}}
{{- end -}}

{{- /* Refuses a pod's users and privileges that contradict each other, as merged. Takes (list path pod). */ -}}
{{- define "pd-cluster.checkSecurity" -}}
{{- $path := index . 0 -}}
{{- $pod := index . 1 -}}
{{- range concat $pod.containers (default list $pod.initContainers) -}}
  {{- $own := .securityContext -}}
  {{- $all := mergeOverwrite (deepCopy (default dict $pod.securityContext)) (default dict $own) -}}
  {{- if and (eq (toString $all.runAsUser) "0") $all.runAsNonRoot -}}
    {{- fail (printf "%s: container %s has runAsUser 0 and runAsNonRoot true, and would never start; set runAsNonRoot to false, or another user" $path .name) -}}
  {{- end -}}
  {{- if and $own.privileged (eq (toString $own.allowPrivilegeEscalation) "false") -}}
    {{- fail (printf "%s: container %s is privileged with allowPrivilegeEscalation false, which Kubernetes refuses; set that to true, or null" $path .name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses a directory of the disk cache that the node could not make. Takes (list path container). */ -}}
{{- define "pd-cluster.checkDisk" -}}
{{- $container := index . 1 -}}
{{- range $flag := ternary $container.args list (dig "securityContext" "readOnlyRootFilesystem" false $container | toString | eq "true") -}}
  {{- $folder := trimPrefix "--disk-cache-dir=" (toString $flag) -}}
  {{- if and $folder (ne $folder (toString $flag)) -}}
    {{- $volumes := list -}}
    {{- range $container.volumeMounts -}}
      {{- if and (not .readOnly) (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $folder)) -}}{{- $volumes = append $volumes .name -}}{{- end -}}
    {{- end -}}
    {{- if not $volumes -}}
      {{- fail (printf "%s.args.disk-cache-dir: %s is in no volume that the node can write; mount one there by extraVolumes and extraVolumeMounts" (index $ 0) $folder) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses names of a pod's containers, and mounts of its volumes, that the API server would. Takes (list path pod). */ -}}
{{- define "pd-cluster.checkNames" -}}
{{- $names := list -}}
{{- $volumes := list -}}
{{- range (index . 1).volumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- range $container := concat (index . 1).containers (default list (index . 1).initContainers) -}}
  {{- if has .name $names -}}
    {{- fail (printf "%s.initContainers: the pod has a container %s already; choose another name" (index $ 0) .name) -}}
  {{- end -}}
  {{- $names = append $names .name -}}
  {{- range .volumeMounts -}}
    {{- if not (has .name $volumes) -}}
      {{- fail (printf "%s: container %s mounts %s, which is no volume of the pod; add it to extraVolumes" (index $ 0) $container.name .name) -}}
    {{- end -}}
  {{- end -}}
  {{- include "pd-cluster.checkDisk" (list (index $ 0) $container) -}}
  {{- range $probe := list "startupProbe" "readinessProbe" "livenessProbe" -}}
    {{- if gt (len (pick (get $container $probe | default dict) "httpGet" "exec" "tcpSocket" "grpc")) 1 -}}
      {{- fail (printf "%s.extraContainerSpec.%s: it asks in two ways, as the chart's httpGet is still there; add httpGet: null" (index $ 0) $probe) -}}
    {{- end -}}
  {{- end -}}
  {{- $limits := get (default dict .resources) "limits" | default dict -}}
  {{- range $resource, $amount := get (default dict .resources) "requests" | default dict -}}
    {{- $limit := get $limits $resource -}}
    {{- if and (ne (toString $limit) "") (gt (include "pd-cluster.bytes" $amount | float64) (include "pd-cluster.bytes" $limit | float64)) -}}
      {{- fail (printf "%s.resources: the request of %s for %s is above the limit (%s); each has a default, so set both" (index $ 0) (toString $amount) $resource (toString $limit)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
