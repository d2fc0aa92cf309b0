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
