{{- /* What a schema cannot say. Each message names what to change. */ -}}
{{- define "pd-cluster.validate" -}}
{{- $roles := include "pd-cluster.roles" . | fromYaml -}}
{{- $full := include "pd-cluster.fullname" . -}}
{{- $kinds := list -}}
{{- $sizes := list -}}
{{- $dtypes := list -}}
{{- range $name, $role := $roles -}}
  {{- $kinds = append $kinds $role.kind -}}
  {{- $sizes = append $sizes (dig "block-size" 0 $role.args | int) -}}
  {{- $dtypes = append $dtypes (dig "dtype" "auto" $role.args) -}}
  {{- if gt (int $role.autoscaling.minReplicas) (int $role.autoscaling.maxReplicas) -}}
    {{- fail (printf "roles.%s.autoscaling: minReplicas (%d) is above maxReplicas (%d)" $name (int $role.autoscaling.minReplicas) (int $role.autoscaling.maxReplicas)) -}}
  {{- end -}}
  {{- if eq $name "router" "pool" "models" "key" "preflight" "test" -}}
    {{- fail (printf "roles.%s: this name is taken by another part of the chart" $name) -}}
  {{- end -}}
  {{- /* a StatefulSet's pods carry its name and 11 characters more in a label of 63 */ -}}
  {{- if gt (add (len $full) (len $name) 1) 52 -}}
    {{- fail (printf "roles.%s: %s-%s is longer than 52 characters, so no pod of it could be made; shorten the role's name, or set fullnameOverride" $name $full $name) -}}
  {{- end -}}
{{- end -}}
{{- if not (or (has "decode" $kinds) (has "mixed" $kinds)) -}}
  {{- fail "roles: no role can decode; add one of kind decode or mixed" -}}
{{- end -}}
{{- if gt (len (uniq $sizes)) 1 -}}
  {{- fail "roles: args.block-size differs; KV moves in blocks, so set it alike in all roles (or in nodeDefaults)" -}}
{{- end -}}
{{- if gt (len (uniq $dtypes)) 1 -}}
  {{- fail "roles: args.dtype differs; KV moves as it is, so set it alike in all roles (or in nodeDefaults)" -}}
{{- end -}}
{{- with .Values.router.autoscaling -}}
  {{- if gt (int .minReplicas) (int .maxReplicas) -}}
    {{- fail "router.autoscaling: minReplicas is above maxReplicas" -}}
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
{{- if eq (int .Values.nodePorts.http) (int .Values.nodePorts.control) -}}
  {{- fail "nodePorts: http and control must differ" -}}
{{- end -}}
{{- end -}}
