{{/* The name of the Ray resource, with which every other name begins. _validate.tpl limits its length. */}}
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

{{/* Whether the ranks run on the pods of the engines, for example because both share a GPU. */}}
{{- define "rayloom.isColocated" -}}
{{- eq (int .Values.trainer.replicas) 0 -}}
{{- end -}}

{{/* The names of the ports that Prometheus reads, as JSON; only the first is also on workers. */}}
{{- define "rayloom.metricsPorts" -}}
["metrics", "as-metrics", "dash-metrics", "rayloom-metrics"]
{{- end -}}

{{/* The field `suspend`, left out if it is false, because Kueue sets the field too. */}}
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

{{/* Digests of the two halves of the operator's object; the next upgrade compares them to see which half changes. */}}
{{- define "rayloom.digests" -}}
rayloom/cluster: {{ include "rayloom.clusterSpec" . | fromYaml | toJson | sha256sum | trunc 16 | quote }}
rayloom/serve: {{ include "rayloom.serveConfig" . | fromYaml | toJson | sha256sum | trunc 16 | quote }}
{{- end -}}

{{/* The labels by which pods are found. They never change, because a changed label in a pod template would
     require a new cluster. */}}
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

{{/* The metadata of an object. Takes: context; suffix or name (the whole name); annotations; labels, which are added to
     the chart's labels and override them; namespace, if it is not the release's. In another namespace, the name begins
     with the release's namespace, because each namespace may have a release of the same name. */}}
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

{{/* The image of a group and its pull policy: the group's own keys override those of image. If the group has a
     repository or a tag, the digest of image is not used. Takes: context, name (of the group). */}}
{{- define "rayloom.imageOf" -}}
{{- $own := index .context.Values .name "image" | default dict -}}
{{- $image := deepCopy .context.Values.image -}}
{{- if or $own.repository $own.tag }}{{- $_ := set $image "digest" "" -}}{{- end -}}
{{- $image = mergeOverwrite $image $own -}}
name: {{ ternary (printf "%s@%s" $image.repository $image.digest) (printf "%s:%s" $image.repository $image.tag) (ne $image.digest "") | quote }}
pullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* The service account of a group. Environments may run untrusted code, so their pods have an account without the
     rights of the run's account, in the cluster and in the cloud. Takes: context, name (of the group). */}}
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

{{/* A secret's value in base64: the value in the cluster, or a new value if there is none or if auth.rotation
     has changed since that value was made. Takes: context, name, key. `helm template` sees no cluster, and
     makes a new value each time. */}}
{{- define "rayloom.keptSecret" -}}
{{- $found := lookup "v1" "Secret" .context.Release.Namespace .name -}}
{{- $rotation := dig "metadata" "annotations" "rayloom/rotation" "" $found -}}
{{- $kept := eq $rotation .context.Values.auth.rotation | ternary (dig "data" .key "" $found) "" -}}
{{- default (randAlphaNum 48 | b64enc) $kept -}}
{{- end -}}

{{/* The configuration as it is sent: your own without sections that are null, and the addresses at which a pod
     listens by default. */}}
{{- define "rayloom.sentConfig" -}}
{{- $own := deepCopy .Values.config -}}
{{- range $section, $settings := .Values.config -}}
{{- if kindIs "invalid" $settings }}{{- $_ := unset $own $section }}{{- end -}}
{{- end -}}
{{- $listens := dict "service" (dict "host" "0.0.0.0" "port" 8000) "metrics" (dict "host" "0.0.0.0" "port" 9400) -}}
{{- mergeOverwrite $listens $own | toYaml -}}
{{- end -}}

{{/* The sent configuration with all of Rayloom's defaults, for the templates to read. */}}
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

{{/* A quantity as text for a manifest, in which a large number would become 3e+09. */}}
{{- define "rayloom.size" -}}
{{- toJson . | trimAll "\"" | quote -}}
{{- end -}}

{{/* The texts that occur more than once in a list, as JSON. */}}
{{- define "rayloom.repeated" -}}
{{- $seen := dict -}}
{{- $repeated := list -}}
{{- range . -}}
{{- if hasKey $seen . -}}{{- $repeated = append $repeated . -}}{{- end -}}
{{- $_ := set $seen . true -}}
{{- end -}}
{{- uniq $repeated | toJson -}}
{{- end -}}

{{/* The custom resources by which a group offers its roles (service/launch/placement.py), quoted because the
     operator passes them to `ray start` through a shell. Takes: the roles. */}}
{{- define "rayloom.roles" -}}
{{- $offered := list -}}
{{- range . }}{{- $offered = append $offered (printf "\"rayloom_%s\": 1" .) -}}{{- end -}}
{{- printf "%q" (printf "{%s}" (join ", " $offered)) | squote -}}
{{- end -}}
