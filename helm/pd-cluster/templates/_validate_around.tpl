{{- /* What a schema cannot say of what is around the pods: Services, monitors, scaling, budgets. Takes the root. */ -}}
{{- define "pd-cluster.validateAround" -}}
{{- with .Values.router.service -}}
  {{- if and .nodePort (eq .type "ClusterIP") -}}
    {{- fail "router.service.nodePort: a Service of type ClusterIP has none; set type to NodePort or LoadBalancer" -}}
  {{- end -}}
  {{- if and .externalTrafficPolicy (eq .type "ClusterIP") -}}
    {{- fail "router.service.externalTrafficPolicy: nothing comes from outside to type ClusterIP; set type to NodePort or LoadBalancer" -}}
  {{- end -}}
  {{- if and (or .loadBalancerClass .loadBalancerSourceRanges) (ne .type "LoadBalancer") -}}
    {{- fail "router.service: loadBalancerClass and loadBalancerSourceRanges need type LoadBalancer" -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.router.inferencePool.enabled (eq (int .Values.router.service.port) (int .Values.router.inferencePool.grpcPort)) -}}
  {{- fail "router.service.port: it must differ from router.inferencePool.grpcPort, which the same Service has" -}}
{{- end -}}
{{- with dig "rollingUpdate" dict (default dict .Values.router.strategy) -}}
  {{- if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
    {{- fail "router.strategy.rollingUpdate: with maxSurge and maxUnavailable 0 no pod could be replaced; set one of them to 1" -}}
  {{- end -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
  {{- with index $.Values.monitoring $name -}}
    {{- if .scrapeTimeout -}}
      {{- if gt (include "pd-cluster.ms" .scrapeTimeout | int64) (include "pd-cluster.ms" .interval | int64) -}}
        {{- fail (printf "monitoring.%s.scrapeTimeout: %s is above the interval (%s), which Prometheus refuses" $name .scrapeTimeout .interval) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- include "pd-cluster.validateBudget" (list "router" .Values.router.podDisruptionBudget) -}}
{{- range $name, $role := include "pd-cluster.roles" . | fromJson -}}
  {{- include "pd-cluster.validateBudget" (list (printf "roles.%s" $name) $role.podDisruptionBudget) -}}
  {{- with $role.autoscaling -}}
    {{- $keda := and .enabled (eq .by "keda") -}}
    {{- if and .enabled (eq (int .minReplicas) 0) (or (eq .by "hpa") (ne $role.kind "prefill")) -}}
      {{- fail (printf "roles.%s.autoscaling.minReplicas: 0 is for kind prefill by keda or external, where decode nodes read the prompts meanwhile; give this role at least 1" $name) -}}
    {{- end -}}
    {{- if and $keda (not .keda.prometheus) (not .keda.triggers) -}}
      {{- fail (printf "roles.%s.autoscaling.keda.prometheus: name the URL of the server that scrapes the routers, or triggers of your own" $name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* Takes (list where budget). */ -}}
{{- define "pd-cluster.validateBudget" -}}
{{- with index . 1 -}}
  {{- if and (ne (toString .minAvailable) "") (ne (toString .maxUnavailable) "") -}}
    {{- fail (printf "%s.podDisruptionBudget: minAvailable and maxUnavailable exclude each other; leave one of them empty" (index $ 0)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* Whether a budget lets no pod go, so that drains of machines wait for good: "true" or nothing. Takes a role or the router. */ -}}
{{- define "pd-cluster.blocksDrains" -}}
{{- $pods := include "pd-cluster.fewestReplicas" . | int -}}
{{- with .podDisruptionBudget -}}
{{- $least := default "" .minAvailable | toString -}}
{{- $needed := hasSuffix "%" $least | ternary (divf (mulf (trimSuffix "%" $least) $pods) 100 | ceil) $least | int -}}
{{- if and .enabled $pods (or (has (toString .maxUnavailable) (list "0" "0%")) (and $least (ge $needed $pods))) }}true{{ end -}}
{{- end -}}
{{- end -}}
