{{- define "pd-cluster.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Selectors of everything in the release. Takes the root. */ -}}
{{- define "pd-cluster.releaseLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Selectors of one component. Takes (list root component). */ -}}
{{- define "pd-cluster.selectorLabels" -}}
{{ include "pd-cluster.releaseLabels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* Labels of an object. Takes (list root component), and as a third item labels of its own, which win over commonLabels. */ -}}
{{- define "pd-cluster.labels" -}}
{{ include "pd-cluster.selectorLabels" (list (index . 0) (index . 1)) }}
{{- range $key, $value := merge dict (kindIs "map" (last .) | ternary (last .) dict) (default dict (index . 0).Values.commonLabels) }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- with index . 0 }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
{{- end -}}

{{- /* Takes (list root image). */ -}}
{{- define "pd-cluster.image" -}}
{{- with index . 1 -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default (index $ 0).Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pd-cluster.keySecret" -}}
{{- default (printf "%s-key" (include "pd-cluster.fullname" .)) .Values.clusterKey.existingSecret -}}
{{- end -}}

{{- /* Role name -> its settings on top of nodeDefaults. Read it with fromJson: YAML takes most of the time of a rendering. */ -}}
{{- define "pd-cluster.roles" -}}
{{- $shared := include "pd-cluster.imageOn" (list .Values.image .Values.nodeDefaults.image) | fromJson -}}
{{- $roles := dict -}}
{{- range $name, $role := .Values.roles -}}
{{- $image := include "pd-cluster.imageOn" (list $shared (default dict $role.image)) | fromJson -}}
{{- $merged := set (mergeOverwrite (deepCopy $.Values.nodeDefaults) $role) "image" $image -}}
{{- range list "args" "resources" "affinity" }}{{ $_ := set $merged . (get $merged . | default dict) }}{{ end -}}
{{- $_ := set $roles $name $merged -}}
{{- end -}}
{{- toJson $roles -}}
{{- end -}}

{{- /* Labels of the pods that are nodes, as one selector. */ -}}
{{- define "pd-cluster.nodeSelector" -}}
pd-cluster/part=node
{{- range $key, $value := include "pd-cluster.releaseLabels" . | fromYaml }},{{ $key }}={{ $value }}{{ end }}
{{- end -}}

{{- /* The smallest number of a role's pods. Takes the role on top of its defaults. */ -}}
{{- define "pd-cluster.fewestReplicas" -}}
{{- ternary .autoscaling.minReplicas .replicas .autoscaling.enabled | int -}}
{{- end -}}

{{- /* The nodes in a role's pod, each on top of the role: one, or of a pair a prefill and a decode node.
       Takes (list root role). Read it with fromJsonArray. */ -}}
{{- define "pd-cluster.podNodes" -}}
{{- $ports := (index . 0).Values.nodePorts -}}
{{- $role := index . 1 -}}
{{- if ne $role.kind "pair" -}}
{{- list (mergeOverwrite (deepCopy $role) (dict "container" "node" "suffix" "" "http" $ports.http "control" $ports.control)) | toJson -}}
{{- else -}}
{{- $prefill := dict "kind" "prefill" "suffix" "" "http" $ports.http "control" $ports.control -}}
{{- $decode := dict "kind" "decode" "suffix" "-decode" "http" $ports.decodeHttp "control" $ports.decodeControl -}}
{{- $first := 0 -}}
{{- $nodes := list -}}
{{- range $node := list $prefill $decode -}}
{{- $node = mergeOverwrite (deepCopy $role) (deepCopy (dig "pair" $node.kind dict $role)) $node (dict "container" $node.kind) -}}
{{- $end := add $first $node.gpus.count | int -}}
{{- $nodes = append $nodes (set $node "devices" (untilStep (int $first) $end 1 | join ",")) -}}
{{- $first = $end -}}
{{- end -}}
{{- toJson $nodes -}}
{{- end -}}
{{- end -}}

{{- /* The kind of the node at a pod's port `http`. Takes the role. */ -}}
{{- define "pd-cluster.firstKind" -}}
{{- ternary "prefill" .kind (eq .kind "pair") -}}
{{- end -}}

{{- /* Whether a role of the release is a pair: "true" or nothing. */ -}}
{{- define "pd-cluster.hasPair" -}}
{{- range .Values.roles }}{{ if eq .kind "pair" }}true{{ end }}{{ end -}}
{{- end -}}

{{- /* A quantity in bytes, or CPUs. A number of Helm's is a float: 2147483648 is 2.147483648e+09 as text. */ -}}
{{- define "pd-cluster.bytes" -}}
{{- $number := regexFind "^[0-9.]+(e[+]?[0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number (toString .)) | default 1) -}}
{{- end -}}

{{- /* A map of flags as arguments: true -> --flag, false -> --no-flag, a list -> the flag for each. */ -}}
{{- define "pd-cluster.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $flag . | quote }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else }}
- --{{ $flag }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The flags of the model's names in the API: one name, or a list. Takes the root. */ -}}
{{- define "pd-cluster.servedNames" -}}
{{- $names := .Values.model.servedName -}}
{{- include "pd-cluster.flags" (dict "served-model-name" (kindIs "string" $names | ternary (compact (list $names)) $names)) -}}
{{- end -}}

{{- /* Takes (list root component entries): the selectors are the component's own. */ -}}
{{- define "pd-cluster.topologySpread" -}}
{{- $labels := include "pd-cluster.selectorLabels" . -}}
{{- range index . 2 }}
{{- if and .minDomains (ne .whenUnsatisfiable "DoNotSchedule") }}
{{- fail "topologySpread: minDomains is for whenUnsatisfiable DoNotSchedule" }}
{{- end }}
- {{ toYaml . | indent 2 | trim }}
  labelSelector:
    matchLabels:
      {{- $labels | nindent 6 }}
{{- end }}
{{- end -}}

{{- /* A role's resources with its devices, and with the memory that each rank pins with --host-cache-gb (that, or the
       larger --swap-gb) and --lora-host-gb, where that is given. Kubernetes takes an extended resource's request from its limit. */ -}}
{{- define "pd-cluster.nodeResources" -}}
{{- $resources := deepCopy .resources -}}
{{- $ranks := dig "tp" (int .gpus.count) .args | int | max 1 -}}
{{- $host := dig "host-cache-gb" 0 .args | float64 -}}
{{- if $host }}{{ $host = maxf $host (dig "swap-gb" 0 .args | float64) }}{{ end -}}
{{- $host = addf $host (dig "lora-host-gb" 0 .args | float64) -}}
{{- if $host -}}
{{- $host = mulf $host $ranks 1e9 -}}
{{- range $part := list (default dict $resources.requests) (default dict $resources.limits) -}}
{{- if $part.memory }}{{ $_ := set $part "memory" (addf (include "pd-cluster.bytes" $part.memory | float64) $host | printf "%.0f") }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $limits := default dict $resources.limits -}}
{{- if .gpus.claimTemplate }}{{ $_ := set $resources "claims" (list (dict "name" "gpus")) }}
{{- else if .gpus.count }}{{ $_ := set $limits .gpus.resource (.gpus.count | int | toString) }}{{ end -}}
{{- if .rdma.enabled }}{{ $_ := set $limits .rdma.resource (.rdma.count | int | toString) }}{{ end -}}
{{- set $resources "limits" $limits | toYaml -}}
{{- end -}}

{{- /* Where a role's pod may run, and on which claimed GPUs: the same for its nodes and its preflight. */ -}}
{{- define "pd-cluster.placement" -}}
{{- with dig "gpus" "claimTemplate" "" . }}
resourceClaims: [{name: gpus, resourceClaimTemplateName: {{ . | quote }}}]
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "pd-cluster.modelVolume" -}}
name: models
{{- with .Values.model }}
{{- if .volume }}
{{ toYaml .volume }}
{{- else if .existingClaim }}
persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}{{ if .readOnly }}, readOnly: true{{ end }}}
{{- else if .claim.create }}
persistentVolumeClaim: {claimName: {{ include "pd-cluster.fullname" $ }}-models}
{{- else }}
emptyDir: {sizeLimit: {{ .emptyDirSize }}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Whether nodes cannot write the model's volume: "true" or nothing. Takes the root. */ -}}
{{- define "pd-cluster.modelReadOnly" -}}
{{- with .Values.model -}}
{{- $volume := default dict .volume -}}
{{- $source := values $volume | first | default dict -}}
{{- if or .readOnly (hasKey $volume "image") $source.readOnly }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- /* Where a container has the model's volume. Takes (list root read-only). */ -}}
{{- define "pd-cluster.modelMount" -}}
{{- $mount := dict "name" "models" "mountPath" "/models" -}}
{{- with (index . 0).Values.model.subPath }}{{ $_ := set $mount "subPath" . }}{{ end -}}
{{- if index . 1 }}{{ $_ := set $mount "readOnly" true }}{{ end -}}
{{- toJson $mount -}}
{{- end -}}

{{- define "pd-cluster.keyVolume" -}}
name: cluster-key
secret:
  secretName: {{ include "pd-cluster.keySecret" . | quote }}
  defaultMode: 0440
  items: [{key: {{ .Values.clusterKey.key }}, path: cluster-key}]
{{- end -}}

{{- /* What verifies nodes that have TLS. Takes the root. */ -}}
{{- define "pd-cluster.nodeTlsFlags" -}}
{{- with .Values.nodeTls }}
{{- if .ca }}
- --tls-ca=/etc/pd-node-tls/{{ .ca }}
{{- end }}
- --tls-name={{ default (printf "%s-nodes" (include "pd-cluster.fullname" $)) .name }}
{{- end }}
{{- end -}}

{{- /* The targets as flags. Takes a dict of flag and ms. */ -}}
{{- define "pd-cluster.targetFlags" -}}
{{- range $flag, $ms := . }}
{{- if $ms }}
- --{{ $flag }}={{ toJson $ms }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The Secrets that a router reads beside the cluster key: volume name, Secret. Read it with fromYamlArray. */ -}}
{{- define "pd-cluster.routerSecrets" -}}
{{- with .Values.router -}}
{{- with .apiKeys.secret }}
- {name: api-keys, secret: {{ . | quote }}}
{{- end }}
{{- with .tlsSecret }}
- {name: tls, secret: {{ . | quote }}}
{{- end }}
{{- if and .inferencePool.enabled .inferencePool.tlsSecret }}
- {name: picker-tls, secret: {{ .inferencePool.tlsSecret | quote }}}
{{- end }}
{{- end }}
{{- with .Values.nodeTls }}
{{- if and .secret .ca }}
- {name: node-tls, secret: {{ .secret | quote }}, items: [{{ .ca | quote }}]}
{{- end }}
{{- end }}
{{- end -}}
