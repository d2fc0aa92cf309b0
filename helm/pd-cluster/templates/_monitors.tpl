{{- /* The head of a PodMonitor and of a ServiceMonitor. Takes a dict: root, component, monitor. */ -}}
{{- define "pd-cluster.monitorHead" -}}
metadata:
  name: {{ include "pd-cluster.fullname" .root }}-{{ .component }}
  labels:
    {{- include "pd-cluster.labels" (list .root .component .monitor.labels) | nindent 4 }}
  {{- with .monitor.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .monitor.namespaceSelector }}
  namespaceSelector: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- /* How a monitor scrapes a port, as an item of a list. Takes a dict: port, tls (not empty: HTTPS), monitor. */ -}}
{{- define "pd-cluster.scrape" -}}
{{- $fields := dict "port" .port "path" "/metrics" -}}
{{- if .tls }}{{ $_ := merge $fields (dict "scheme" "https" "tlsConfig" (dict "insecureSkipVerify" true)) }}{{ end -}}
{{- range $name := list "interval" "scrapeTimeout" "relabelings" "metricRelabelings" -}}
{{- with get $.monitor $name }}{{ $_ := set $fields $name . }}{{ end -}}
{{- end -}}
{{- toYaml (list $fields) -}}
{{- end -}}

{{- /* A duration of Prometheus, in ms. */ -}}
{{- define "pd-cluster.ms" -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000) (regexFind "[a-z]+$" .)) -}}
{{- end -}}
