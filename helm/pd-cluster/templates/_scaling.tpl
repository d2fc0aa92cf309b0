{{- /* HorizontalPodAutoscaler. Takes a dict: root, component, kind (of the target), name, autoscaling, metrics. */ -}}
{{- define "pd-cluster.hpa" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels:
    {{- include "pd-cluster.labels" (list .root .component) | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ .name }}}
  minReplicas: {{ int .autoscaling.minReplicas }}
  maxReplicas: {{ int .autoscaling.maxReplicas }}
  metrics:
    {{- toYaml .metrics | nindent 4 }}
  {{- with .autoscaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* PodDisruptionBudget. Takes a dict: root, component, name, budget. */ -}}
{{- define "pd-cluster.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "pd-cluster.labels" (list .root .component) | nindent 4 }}
spec:
  {{- if eq (toString .budget.minAvailable) "" }}
  maxUnavailable: {{ eq (toString .budget.maxUnavailable) "" | ternary 1 .budget.maxUnavailable }}
  {{- else }}
  minAvailable: {{ .budget.minAvailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow # a node that never comes up must not hold a machine
  selector:
    matchLabels:
      {{- include "pd-cluster.selectorLabels" (list .root .component) | nindent 6 }}
{{- end -}}

{{- /* KEDA's ScaledObject of a role, by what the routers' feeds tell of its nodes. Each router tells all nodes, hence
       `max by (node)`. Takes a dict: root, component, name, kind (of the role), autoscaling.
       minReplicas 0: without a pod of its own a prefill role has no figures. What wakes it are prompt tokens that wait at
       any node of the release, as many as one of its pods is for, or those that all answers have cost. */ -}}
{{- define "pd-cluster.scaledObject" -}}
{{- $keda := .autoscaling.keda -}}
{{- $full := include "pd-cluster.fullname" .root -}}
{{- $fromZero := eq (int .autoscaling.minReplicas) 0 -}}
{{- $own := printf "{namespace=%q,node=~%q}" .root.Release.Namespace (printf "%s-[0-9]+(-decode)?" .name) -}}
{{- $all := printf "{namespace=%q,node=~%q}" .root.Release.Namespace (printf "%s-.+" $full) -}}
{{- $triggers := list -}}
{{- if $keda.prometheus -}}
{{- /* figures that are missing are an error, so that KEDA keeps what there is: as 0 they would remove pods */ -}}
{{- $common := dict "serverAddress" $keda.prometheus "ignoreNullValues" "false" -}}
{{- if ne .kind "decode" -}}
{{- $query := printf "sum(max by (node) (pd_router_node_queued_tokens%s))" ($fromZero | ternary $all $own) -}}
{{- $tokens := $keda.queuedTokens | int | toString -}}
{{- $queued := merge (dict "query" $query "threshold" $tokens) $common -}}
{{- if $fromZero }}{{ $_ := set $queued "activationThreshold" $tokens }}{{ end -}}
{{- $triggers = append $triggers $queued -}}
{{- end -}}
{{- if $fromZero -}}
{{- $query := include "pd-cluster.promptRate" (list .root $keda.promptTokensPerSecond) -}}
{{- /* 1 wakes one pod and asks for no second one */ -}}
{{- $triggers = append $triggers (merge (dict "query" $query "threshold" "1") $common) -}}
{{- end -}}
{{- if ne .kind "prefill" -}}
{{- $query := printf "sum(max by (node) (pd_router_node_sequences%s))" $own -}}
{{- $triggers = append $triggers (merge (dict "query" $query "threshold" ($keda.sequences | int | toString)) $common) -}}
{{- end -}}
{{- end -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels:
    {{- include "pd-cluster.labels" (list .root .component) | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: StatefulSet, name: {{ .name }}}
  minReplicaCount: {{ int .autoscaling.minReplicas }}
  maxReplicaCount: {{ int .autoscaling.maxReplicas }}
  pollingInterval: {{ int $keda.pollingSeconds }}
  {{- if $fromZero }}
  cooldownPeriod: {{ int $keda.cooldownPeriod }}
  {{- end }}
  {{- with $keda.fallback }}
  fallback: {{ toJson . }}
  {{- end }}
  {{- with .autoscaling.behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml . | nindent 8 }}
  {{- end }}
  triggers:
    {{- range $triggers }}
    - type: prometheus
      metadata:
        {{- toYaml . | nindent 8 }}
    {{- end }}
    {{- with $keda.triggers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- /* Query: 1 while the release's answers cost more prompt tokens per second, less those that a cache had, else 0, also
       before the first answer. Gateways of an InferencePool pass the routers by, so there the nodes tell; a prompt that is
       handed over counts where its stream is. Takes (list root tokens). */ -}}
{{- define "pd-cluster.promptRate" -}}
{{- $root := index . 0 -}}
{{- $byNodes := $root.Values.router.inferencePool.enabled -}}
{{- $from := ternary "pd" "pd_router" $byNodes -}}
{{- $pods := printf "namespace=%q,pod=~%q" $root.Release.Namespace (printf "%s-.+" (include "pd-cluster.fullname" $root)) -}}
{{- $served := printf "{%s%s}[3m]" $pods (ternary ",work!=\"prefill\"" "" $byNodes) -}}
{{- $any := printf "%s{%s}" (ternary "pd_num_waiting" "pd_router_requests_in_flight" $byNodes) $pods -}}
((sum(rate({{ $from }}_prompt_tokens_total{{ $served }})) - sum(rate({{ $from }}_cached_tokens_total{{ $served }}))) > bool {{ index . 1 | int }}) or 0 * count({{ $any }})
{{- end -}}
