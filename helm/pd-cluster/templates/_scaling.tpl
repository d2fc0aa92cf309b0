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
  maxUnavailable: {{ .budget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow # a node that never comes up must not hold a machine
  selector:
    matchLabels:
      {{- include "pd-cluster.selectorLabels" (list .root .component) | nindent 6 }}
{{- end -}}

{{- /* KEDA's ScaledObject of a role, by what the routers' feeds tell of its nodes. Each router tells all nodes, hence
       `max by (node)`. Takes a dict: root, component, name, kind (of the role), autoscaling. */ -}}
{{- define "pd-cluster.scaledObject" -}}
{{- $kind := .kind -}}
{{- $nodes := printf "{namespace=%q,node=~%q}" .root.Release.Namespace (printf "%s-[0-9]+(-decode)?" .name) -}}
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
  pollingInterval: {{ int .autoscaling.keda.pollingSeconds }}
  {{- with .autoscaling.behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml . | nindent 8 }}
  {{- end }}
  triggers:
    {{- with .autoscaling.keda }}
    {{- if ne $kind "decode" }}
    - type: prometheus
      metadata:
        serverAddress: {{ .prometheus | quote }}
        query: {{ printf "sum(max by (node) (pd_router_node_queued_tokens%s))" $nodes | squote }}
        threshold: {{ int .queuedTokens | quote }}
    {{- end }}
    {{- if ne $kind "prefill" }}
    - type: prometheus
      metadata:
        serverAddress: {{ .prometheus | quote }}
        query: {{ printf "sum(max by (node) (pd_router_node_sequences%s))" $nodes | squote }}
        threshold: {{ int .sequences | quote }}
    {{- end }}
    {{- end }}
{{- end -}}
