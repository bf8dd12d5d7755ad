{{/* The name of the Ray resource, and the beginning of every other name. _validate.tpl bounds it. */}}
{{- define "rayloom.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- end -}}

{{/* The groups of workers that have pods, as JSON. */}}
{{- define "rayloom.workers" -}}
{{- $groups := list -}}
{{- range $name := list "inference" "trainer" "environment" -}}
{{- if gt (int (index $.Values $name).replicas) 0 }}{{- $groups = append $groups $name -}}{{- end -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end -}}

{{/* Whether the ranks run on the pods of the engines, as where both share a GPU. */}}
{{- define "rayloom.isColocated" -}}
{{- eq (int .Values.trainer.replicas) 0 -}}
{{- end -}}

{{/* The names of the ports that Prometheus reads, as JSON; all but the first are the head's alone. */}}
{{- define "rayloom.metricsPorts" -}}
["metrics", "as-metrics", "dash-metrics", "rayloom-metrics"]
{{- end -}}

{{/* Left out where it is false: Kueue sets it too. */}}
{{- define "rayloom.suspend" -}}
{{- if .Values.suspend -}}
suspend: true
{{- end -}}
{{- end -}}

{{/* The metadata of the operator's object. */}}
{{- define "rayloom.rayMetadata" -}}
{{- $queue := .Values.kueue.queueName -}}
{{- $labels := ternary (dict "kueue.x-k8s.io/queue-name" $queue) (dict) (ne $queue "") -}}
{{- with .Values.kueue.priorityClass }}{{- $_ := set $labels "kueue.x-k8s.io/priority-class" . -}}{{- end -}}
{{- $labels = mergeOverwrite (deepCopy .Values.labels) $labels -}}
{{- $annotations := mergeOverwrite (deepCopy .Values.annotations) (include "rayloom.digests" . | fromYaml) -}}
{{- include "rayloom.metadata" (dict "context" . "labels" $labels "annotations" $annotations) -}}
{{- end -}}

{{/* Of the two halves of the operator's object, by which the next upgrade sees what it changes. */}}
{{- define "rayloom.digests" -}}
rayloom/cluster: {{ include "rayloom.clusterSpec" . | fromYaml | toJson | sha256sum | trunc 16 | quote }}
rayloom/serve: {{ include "rayloom.serveConfig" . | fromYaml | toJson | sha256sum | trunc 16 | quote }}
{{- end -}}

{{/* What a pod is found by. Stable: any other label in a pod template would ask for a new cluster. */}}
{{- define "rayloom.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: rayloom
{{- end -}}

{{- define "rayloom.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name | quote }}
{{ include "rayloom.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* The metadata of an object. Takes: context; suffix of the name, or the whole name; annotations, and labels beside the
     chart's own or in their place, if it has any; another namespace than the release's, in which the name begins with
     the release's, as there may be a release of this name in each. */}}
{{- define "rayloom.metadata" -}}
{{- $release := .context.Release.Namespace -}}
{{- $isElsewhere := and (not (empty .namespace)) (ne (toString .namespace) $release) -}}
name: {{ default (printf "%s%s%s" (ternary (printf "%s-" $release) "" $isElsewhere) (include "rayloom.fullname" .context) (default "" .suffix)) .name | quote }}
namespace: {{ default $release .namespace | quote }}
labels: {{- mergeOverwrite (deepCopy .context.Values.commonLabels) (include "rayloom.labels" .context | fromYaml) (default dict .labels) | toYaml | nindent 2 }}
{{- with .annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The image of a group and when it is pulled: its own keys over those of image. A repository or a tag of its own
     takes the place of a digest of image. Takes: context, name (of the group). */}}
{{- define "rayloom.imageOf" -}}
{{- $own := index .context.Values .name "image" | default dict -}}
{{- $image := deepCopy .context.Values.image -}}
{{- if or $own.repository $own.tag }}{{- $_ := set $image "digest" "" -}}{{- end -}}
{{- $image = mergeOverwrite $image $own -}}
name: {{ ternary (printf "%s@%s" $image.repository $image.digest) (printf "%s:%s" $image.repository $image.tag) (ne $image.digest "") | quote }}
pullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* Environments may run code that nobody vouches for: they get nothing of what the account may do, nor
     what a cloud hands to its pods. Takes: context, name (of the group). */}}
{{- define "rayloom.serviceAccountName" -}}
{{- $account := .context.Values.serviceAccount -}}
{{- $name := include "rayloom.fullname" .context -}}
{{- if eq .name "environment" -}}
{{- ternary (printf "%s-environment" $name) "default" $account.create -}}
{{- else -}}
{{- default (ternary $name "default" $account.create) $account.name -}}
{{- end -}}
{{- end -}}

{{- define "rayloom.apiSecretName" -}}
{{- default (printf "%s-api-key" (include "rayloom.fullname" .)) .Values.auth.api.existingSecret -}}
{{- end -}}

{{- define "rayloom.raySecretName" -}}
{{- default (printf "%s-ray-token" (include "rayloom.fullname" .)) .Values.auth.ray.existingSecret -}}
{{- end -}}

{{/* A secret's value, base64: the one that is there, else a new one; a new one also where the text of
     auth.rotation is another than when it was drawn. Takes: context, name, key. `helm template` sees no
     cluster, and makes a new one each time. */}}
{{- define "rayloom.keptSecret" -}}
{{- $found := lookup "v1" "Secret" .context.Release.Namespace .name -}}
{{- $rotation := dig "metadata" "annotations" "rayloom/rotation" "" $found -}}
{{- $kept := eq $rotation .context.Values.auth.rotation | ternary (dig "data" .key "" $found) "" -}}
{{- default (randAlphaNum 48 | b64enc) $kept -}}
{{- end -}}

{{/* The configuration as it is sent: your own without sections that are null, and where a pod listens. */}}
{{- define "rayloom.sentConfig" -}}
{{- $own := deepCopy .Values.config -}}
{{- range $section, $settings := .Values.config -}}
{{- if kindIs "invalid" $settings }}{{- $_ := unset $own $section }}{{- end -}}
{{- end -}}
{{- $listens := dict "service" (dict "host" "0.0.0.0" "port" 8000) "metrics" (dict "host" "0.0.0.0" "port" 9400) -}}
{{- mergeOverwrite $listens $own | toYaml -}}
{{- end -}}

{{/* The same with the tree's defaults, for the templates to read. */}}
{{- define "rayloom.config" -}}
{{- mergeOverwrite (.Files.Get "files/config-defaults.yaml" | fromYaml) (include "rayloom.sentConfig" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* A Kubernetes quantity as a number. Takes: the quantity, a text or a number. */}}
{{- define "rayloom.quantity" -}}
{{- if kindIs "string" . -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
      "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624
      "Ei" 1152921504606846976 -}}
{{- mulf $number (get $factors (trimPrefix $number .)) -}}
{{- else -}}
{{- float64 . -}}
{{- end -}}
{{- end -}}

{{/* A quantity as it stands in a manifest: a large number would become 3e+09. */}}
{{- define "rayloom.size" -}}
{{- toJson . | trimAll "\"" | quote -}}
{{- end -}}

{{/* Those of a list of texts that stand in it more than once, as JSON. */}}
{{- define "rayloom.repeated" -}}
{{- $seen := dict -}}
{{- $repeated := list -}}
{{- range . -}}
{{- if hasKey $seen . -}}{{- $repeated = append $repeated . -}}{{- end -}}
{{- $_ := set $seen . true -}}
{{- end -}}
{{- uniq $repeated | toJson -}}
{{- end -}}

{{/* What a group offers to the parts of its role (service/launch/placement.py), as the operator hands
     it to `ray start` through a shell. Takes: the roles. */}}
{{- define "rayloom.roles" -}}
{{- $offered := list -}}
{{- range . }}{{- $offered = append $offered (printf "\"rayloom_%s\": 1" .) -}}{{- end -}}
{{- printf "%q" (printf "{%s}" (join ", " $offered)) | squote -}}
{{- end -}}
