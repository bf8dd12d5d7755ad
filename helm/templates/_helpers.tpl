{{/* The name of the RayService, and the beginning of every other name. _validate.tpl bounds it. */}}
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

{{/* What a pod is found by. Stable: any other label in a pod template would ask for a new cluster. */}}
{{- define "rayloom.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: rayloom
{{- end -}}

{{- define "rayloom.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
{{ include "rayloom.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "rayloom.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rayloom.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rayloom.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "rayloom.apiSecretName" -}}
{{- default (printf "%s-api-key" (include "rayloom.fullname" .)) .Values.auth.api.existingSecret -}}
{{- end -}}

{{- define "rayloom.raySecretName" -}}
{{- default (printf "%s-ray-token" (include "rayloom.fullname" .)) .Values.auth.ray.existingSecret -}}
{{- end -}}

{{- define "rayloom.claimName" -}}
{{- default (printf "%s-checkpoints" (include "rayloom.fullname" .)) .Values.checkpoints.existingClaim -}}
{{- end -}}

{{/* A secret's value, base64: the one that is there, else a new one.
     Takes: context, secret, key. `helm template` sees no cluster and makes a new one each time. */}}
{{- define "rayloom.keptSecret" -}}
{{- $found := lookup "v1" "Secret" .context.Release.Namespace .secret -}}
{{- $value := dig "data" .key "" $found -}}
{{- default (randAlphaNum 48 | b64enc) $value -}}
{{- end -}}

{{/* What a group offers to the parts of its role (service/launch/placement.py), as the operator hands
     it to `ray start` through a shell. Takes: the role. */}}
{{- define "rayloom.role" -}}
{{- printf "%q" (printf "{\"rayloom_%s\": 1}" .) | squote -}}
{{- end -}}
