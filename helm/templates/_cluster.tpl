{{/* The Ray cluster, the same under a RayService, a RayJob and a RayCluster. */}}
{{- define "rayloom.clusterSpec" -}}
rayVersion: {{ .Values.rayVersion | quote }}
authOptions:
  mode: {{ .Values.auth.ray.mode }}
  {{- if eq .Values.auth.ray.mode "token" }}
  secretName: {{ include "rayloom.raySecretName" . | quote }}
  {{- end }}
{{- with .Values.gcs }}
{{- if ne .backend "memory" }}
gcsFaultToleranceOptions:
  {{- if eq .backend "redis" }}
  redisAddress: {{ .redis.address | quote }}
  {{- with .redis.existingSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ . | quote }}
        key: {{ $.Values.gcs.redis.key | quote }}
  {{- end }}
  {{- else }}
  backend: rocksdb
  storage:
    accessModes: [ReadWriteOnce]
    size: {{ include "rayloom.size" .storage.size }}
    {{- with .storage.storageClass }}
    storageClassName: {{ . | quote }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}
headGroupSpec:
  rayStartParams:
    # Without CPUs, so that no engine, rank or environment actor is placed next to the control store.
    num-cpus: "0"
    dashboard-host: 0.0.0.0
    object-store-memory: {{ include "rayloom.objectStore" .Values.head.shmSize | quote }}
    resources: {{ include "rayloom.roles" (list "control") }}
    {{- $head := include "rayloom.group" (dict "context" . "name" "head") | fromYaml }}
    {{- range $option, $value := $head.rayStartParams }}
    {{ $option }}: {{ $value | quote }}
    {{- end }}
  labels:
    rayloom/template: {{ include "rayloom.templateHash" (dict "context" . "name" "head") | quote }}
  template: {{- include "rayloom.podTemplate" (dict "context" . "name" "head") | nindent 4 }}
workerGroupSpecs:
  {{- range $name := include "rayloom.workers" . | fromJsonArray }}
  {{- $group := index $.Values $name }}
  - groupName: {{ $name }}
    # The size is fixed, because a run places all its parts at the start.
    replicas: {{ $group.replicas }}
    minReplicas: {{ $group.replicas }}
    maxReplicas: {{ $group.replicas }}
    rayStartParams:
      num-cpus: {{ $group.rayCpus | quote }}
      num-gpus: {{ $group.gpus | quote }}
      object-store-memory: {{ include "rayloom.objectStore" $group.shmSize | quote }}
      {{- $roles := list (eq $name "environment" | ternary "environments" $name) }}
      {{- if and (eq $name "inference") (eq (include "rayloom.isColocated" $) "true") }}
      {{- $roles = append $roles "trainer" }}
      {{- end }}
      resources: {{ include "rayloom.roles" $roles }}
      {{- $whole := include "rayloom.group" (dict "context" $ "name" $name) | fromYaml }}
      {{- range $option, $value := $whole.rayStartParams }}
      {{ $option }}: {{ $value | quote }}
      {{- end }}
    labels:
      rayloom/template: {{ include "rayloom.templateHash" (dict "context" $ "name" $name) | quote }}
    template: {{- include "rayloom.podTemplate" (dict "context" $ "name" $name) | nindent 6 }}
  {{- end }}
{{- end -}}

{{- define "rayloom.serveConfig" -}}
{{- $config := include "rayloom.config" . | fromYaml -}}
proxy_location: HeadOnly
http_options:
  host: {{ $config.service.host | quote }}
  port: {{ $config.service.port }}
applications:
  - name: rayloom
    import_path: deploy.serve_app:build
    route_prefix: /
    args: {{- include "rayloom.arguments" . | nindent 6 }}
{{- end -}}

{{/* The arguments of deploy/serve_app.py and deploy/train_job.py. They contain the configuration itself, so that
     configuration and command always have the same version. */}}
{{- define "rayloom.arguments" -}}
{{- $config := include "rayloom.config" . | fromYaml -}}
config: {{- include "rayloom.sentConfig" . | nindent 2 }}
run_dir: {{ printf "%s/runs/%s" .Values.checkpoints.mountPath $config.run.name | quote }}
{{- if not .Values.database.existingSecret }}
state_dir: {{ printf "/database/%s" $config.run.name | quote }}
{{- end }}
{{- end -}}

{{/* Size of Ray's object store in bytes: a part of /dev/shm, which NCCL and vLLM use too. Ray's default ignores the
     size of /dev/shm, and puts the store on the disk if it does not fit. Takes: shmSize. */}}
{{- define "rayloom.objectStore" -}}
{{- mulf 0.8 (include "rayloom.quantity" .) | int64 -}}
{{- end -}}
