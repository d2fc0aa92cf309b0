{{- /* Labels of a workload's pods: those of an object, less what a new version of the chart changes, so that it restarts
       nothing by itself. Takes (list root component). */ -}}
{{- define "pd-cluster.podLabels" -}}
{{- omit (include "pd-cluster.labels" . | fromYaml) "helm.sh/chart" "app.kubernetes.io/version" | toYaml -}}
{{- end -}}

{{- /* `replicas` of a workload, or nothing. Takes a dict: root, kind, name, of (the role or the router).
       With an autoscaler it is what runs: a field that Helm leaves out falls back to 1. Before there is a workload it is
       minReplicas. Where no cluster can be asked (helm template, Argo CD) it is left out: the one that is rendered would
       be applied again and again. No list of workloads, not even an empty one, means no cluster. */ -}}
{{- define "pd-cluster.replicas" -}}
{{- $scaling := .of.autoscaling -}}
{{- $running := dict -}}
{{- if $scaling.enabled }}{{ $running = lookup "apps/v1" .kind .root.Release.Namespace .name }}{{ end -}}
{{- if not $scaling.enabled -}}
replicas: {{ int .of.replicas }}
{{- /* an HPA leaves a workload of 0 alone */}}
{{- else if and $running (or $running.spec.replicas (ne $scaling.by "hpa")) -}}
replicas: {{ int $running.spec.replicas }}
{{- else if or $running (lookup "apps/v1" .kind .root.Release.Namespace "") -}}
replicas: {{ max 1 (int $scaling.minReplicas) }}
{{- end -}}
{{- end -}}

{{- /* Seconds that a rollout of the router may make no progress: it is ready only with a decode node. Takes the root. */ -}}
{{- define "pd-cluster.progressSeconds" -}}
{{- $longest := 0 -}}
{{- range $role := include "pd-cluster.roles" . | fromJson -}}
{{- range $node := include "pd-cluster.podNodes" (list $ $role) | fromJsonArray -}}
{{- $longest = max $longest (int $node.startDeadlineSeconds) -}}
{{- end -}}
{{- end -}}
{{- add $longest 120 (dig "minReadySeconds" 0 .Values.router | int) -}}
{{- end -}}

{{- /* What a node is started with, or what `pd-cluster check` makes of that before the first install: the same but for
       what is not there yet (the key, certificates, a model to download). Takes (list root node isCheck). */ -}}
{{- define "pd-cluster.nodeArgs" -}}
{{- $root := index . 0 -}}
{{- $isCheck := index . 2 -}}
{{- $model := $root.Values.model.id -}}
{{- with index . 1 -}}
{{- if $isCheck -}}
- check
- --role={{ .kind }}
{{- else -}}
- {{ .kind }}
- --host=0.0.0.0
{{- end }}
- --port={{ int .http }}
- --control-port={{ int .control }}
- --kv-ports={{ $root.Values.nodePorts.kv }}
{{- if not $isCheck }}
- --node-id=$(POD_NAME){{ .suffix }}
- --cluster-key-file=/etc/pd-cluster/cluster-key
{{- end }}
- {{ printf "--connector=%s" (ternary "lmcache" $root.Values.connector $root.Values.pool.enabled) | quote }}
{{- if $root.Values.pool.enabled }}
- --pool-url=lm://{{ include "pd-cluster.fullname" $root }}-pool:{{ int $root.Values.pool.port }}
{{- end }}
- --start-deadline-s={{ int .startDeadlineSeconds }}
- --drain-s={{ int .drainSeconds }}
- --log-level={{ $root.Values.logLevel }}
{{- if and $root.Values.nodeTls.secret (not $isCheck) }}
- --tls-cert=/etc/pd-node-tls/tls.crt
- --tls-key=/etc/pd-node-tls/tls.key
{{- include "pd-cluster.nodeTlsFlags" $root }}
{{- end }}
{{- with $root.Values.slo }}
{{- include "pd-cluster.targetFlags" (dict "slo-ttft-ms" .ttftMs "slo-tpot-ms" .tpotMs "slo-itl-ms" .itlMs) }}
{{- end }}
{{- if and $isCheck $model (not (include "pd-cluster.modelIsThere" (list $root .))) }}
- --skip-model
{{- else if $model }}
- {{ printf "--model=%s" $model | quote }}
{{- end }}
{{- include "pd-cluster.servedNames" $root }}
{{- if and (or .gpus.count .gpus.claimTemplate) (not (hasKey .args "device")) }}
- --device=cuda # else a node that sees no GPU serves on the CPU. It is torch's word for AMD's GPUs, too
{{- end }}
{{- if gt (int .gpus.count) 1 }}
- --tp={{ int .gpus.count }}
{{- end }}
{{- include "pd-cluster.flags" .args }}
{{- end }}
{{- end -}}

{{- /* Whether a preflight can read the model: it is in the image or on a volume that exists, and nothing fetches it first.
       Takes (list root node). */ -}}
{{- define "pd-cluster.modelIsThere" -}}
{{- $model := (index . 0).Values.model -}}
{{- $isMounted := or $model.existingClaim $model.volume (not (hasPrefix "/models/" $model.id)) -}}
{{- if and (hasPrefix "/" $model.id) $isMounted (not (index . 1).initContainers) }}true{{ end -}}
{{- end -}}
