{{- /* What is done to every pod of the chart, in one place. A template writes what is particular to its pod, and beside
       `kind` a key `podOf` with the settings of the router, a role, the pool or the test. Takes (list root text). */ -}}
{{- define "pd-cluster.objects" -}}
{{- $root := index . 0 -}}
{{- include "pd-cluster.validateOnce" $root -}}
{{- range regexSplit "(?m)^---$" (index . 1) -1 }}
{{- if trim . }}
{{- $object := fromYaml . }}
{{- with $object.Error }}{{ fail . }}{{ end }}
{{- with $object.podOf }}
{{- include "pd-cluster.finishPod" (dict "root" $root "of" . "pod" (dig "template" "spec" $object.spec $object.spec) "name" $object.metadata.name) }}
{{- end }}
---
{{ omit $object "podOf" | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The settings of a role or the router, with what holds for nodes and routers alike. Takes (list root settings path). */ -}}
{{- define "pd-cluster.podOf" -}}
{{- $values := (index . 0).Values -}}
{{- $own := index . 1 -}}
{{- $lists := dict "path" (index . 2) -}}
{{- range list "env" "envFrom" }}{{ $_ := set $lists . (concat (get $values . | default list) (get $own . | default list)) }}{{ end -}}
{{- mergeOverwrite (deepCopy $own) $lists | toJson -}}
{{- end -}}

{{- /* Changes the pod's spec in place. Takes a dict: root, of (settings), pod (a spec), name (of its object). */ -}}
{{- define "pd-cluster.finishPod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $of := .of -}}
{{- $pod := .pod -}}
{{- $image := include "pd-cluster.imageOn" (list $values.image (default dict $of.image)) | fromJson -}}
{{- $security := deepCopy (default dict $values.containerSecurityContext) -}}
{{- $locks := and (dig "rdma" "enabled" false $of) (dig "rdma" "rootWithIpcLock" false $of) -}}
{{- if $locks -}}
  {{- $more := dict "runAsNonRoot" false "runAsUser" 0 "capabilities" (dict "add" (list "IPC_LOCK")) -}}
  {{- include "pd-cluster.merge" (list $security $more "") -}}
{{- end -}}
{{- /* a Service called pd-... would put PD_... variables into the environment; the router says that it needs a token */ -}}
{{- $common := dict "enableServiceLinks" false "automountServiceAccountToken" false "securityContext" (deepCopy (default dict $values.podSecurityContext)) -}}
{{- with $values.imagePullSecrets }}{{ $_ := set $common "imagePullSecrets" . }}{{ end -}}
{{- with include "pd-cluster.account" (list (default dict $of.serviceAccount) .name) }}{{ $_ := set $common "serviceAccountName" . }}{{ end -}}
{{- range $key, $value := $common }}{{ if not (hasKey $pod $key) }}{{ $_ := set $pod $key $value }}{{ end }}{{ end -}}
{{- range $container := $pod.containers -}}
  {{- $own := dict "image" (include "pd-cluster.image" (list $root $image)) "imagePullPolicy" $image.pullPolicy "securityContext" (deepCopy $security) -}}
  {{- with include "pd-cluster.env" (list $container.env $of.env) | fromJsonArray }}{{ $_ := set $own "env" . }}{{ end -}}
  {{- with $of.envFrom }}{{ $_ := set $own "envFrom" . }}{{ end -}}
  {{- range $key, $value := $own }}{{ $_ := set $container $key $value }}{{ end -}}
  {{- include "pd-cluster.merge" (list $container (dict "volumeMounts" (default list $of.extraVolumeMounts)) (printf "%s.extraVolumeMounts" $of.path)) -}}
  {{- include "pd-cluster.merge" (list $container (default dict $of.extraContainerSpec) (printf "%s.extraContainerSpec" $of.path)) -}}
{{- end -}}
{{- range $given := default list $of.initContainers -}}
  {{- $made := dict "securityContext" (deepCopy (default dict $values.containerSecurityContext)) -}}
  {{- if not $given.image }}{{ $made = mergeOverwrite $made (dict "image" (include "pd-cluster.image" (list $root $image)) "imagePullPolicy" $image.pullPolicy) }}{{ end -}}
  {{- include "pd-cluster.merge" (list $made $given $of.path) -}}
  {{- $_ := set $pod "initContainers" (append (default list $pod.initContainers) $made) -}}
{{- end -}}
{{- include "pd-cluster.merge" (list $pod (dict "volumes" (default list $of.extraVolumes)) (printf "%s.extraVolumes" $of.path)) -}}
{{- include "pd-cluster.merge" (list $pod (default dict $of.extraPodSpec) (printf "%s.extraPodSpec" $of.path)) -}}
{{- include "pd-cluster.checkSecurity" (list $of.path $pod) -}}
{{- include "pd-cluster.checkNames" (list $of.path $pod) -}}
{{- if and $locks (eq (toString $pod.hostUsers) "false") -}}
  {{- fail (printf "%s.rdma.rootWithIpcLock: with hostUsers false the capability does not lift the machine's limit of locked memory; leave one of the two out" $of.path) -}}
{{- end -}}
{{- end -}}

{{- /* Merges a map into another, in place: maps key by key, lists after the chart's own, null takes a key out.
       Takes (list map given path); the path is for messages. */ -}}
{{- define "pd-cluster.merge" -}}
{{- $base := index . 0 -}}
{{- $path := index . 2 -}}
{{- range $key, $value := index . 1 -}}
  {{- $own := get $base $key -}}
  {{- if kindIs "invalid" $value -}}
    {{- $_ := unset $base $key -}}
  {{- else if and (kindIs "map" $own) (kindIs "map" $value) -}}
    {{- include "pd-cluster.merge" (list $own $value $path) -}}
  {{- else if and (kindIs "slice" $own) (kindIs "slice" $value) -}}
    {{- $names := list -}}
    {{- $_ := set $base $key (concat $own $value | uniq) -}}
    {{- range get $base $key -}}
      {{- if kindIs "map" . -}}
        {{- $name := default .name .mountPath -}}
        {{- if and $name (has $name $names) -}}
          {{- fail (printf "%s: the pod has %s among its %s already; choose another" $path $name $key) -}}
        {{- end -}}
        {{- $names = append $names $name -}}
      {{- end -}}
    {{- end -}}
  {{- else if and (or (kindIs "map" $own) (kindIs "slice" $own)) (ne (kindOf $own) (kindOf $value)) -}}
    {{- fail (printf "%s: %s is a %s in the pod, and a %s here; write it as Kubernetes has it" $path $key (kindOf $own) (kindOf $value)) -}}
  {{- else -}}
    {{- $_ := set $base $key $value -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* Variables, of which a later one takes the place of an earlier one of its name. One of the chart's own gives way
       before that: a variable sees those before it, $(CACHE) in HF_HOME too. Takes (list chart's user's); read it with
       fromJsonArray. */ -}}
{{- define "pd-cluster.env" -}}
{{- $found := dict -}}
{{- range index . 1 }}{{ $_ := set $found .name . }}{{ end -}}
{{- $kept := list -}}
{{- range index . 0 }}{{ if not (hasKey $found .name) }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- range index . 1 }}{{ $kept = append $kept (get $found .name) }}{{ end -}}
{{- uniq $kept | toJson -}}
{{- end -}}

{{- /* Values of an image on top of others. A repository of its own has a tag and digest of its own, and a tag its own
       digest. Takes (list image own). Read it with fromJson. */ -}}
{{- define "pd-cluster.imageOn" -}}
{{- $own := index . 1 -}}
{{- $base := deepCopy (index . 0) -}}
{{- if $own.repository }}{{ $base = pick $base "pullPolicy" }}{{ else if $own.tag }}{{ $base = omit $base "digest" }}{{ end -}}
{{- mergeOverwrite $base $own | toJson -}}
{{- end -}}

{{- /* The name of an account; nothing: the namespace's default. Takes (list account name-of-one-that-is-made). */ -}}
{{- define "pd-cluster.account" -}}
{{- with index . 0 }}{{ ternary (default (index $ 1) .name) .name (default false .create) }}{{ end -}}
{{- end -}}
