{{/* The pod template of one group. Takes: context, name (of the group), group (its values).

     Neither the chart's version nor a checksum may stand in here: the operator compares pod templates,
     and would want a new cluster for every release. */}}
{{- define "rayloom.podTemplate" -}}
{{- $root := .context -}}
{{- $values := $root.Values -}}
{{- $isHead := eq .name "head" -}}
metadata:
  labels:
    {{- include "rayloom.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  serviceAccountName: {{ include "rayloom.serviceAccountName" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $values.drain.timeoutSeconds 30 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $isHead }}
      image: {{ include "rayloom.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      env: {{- include "rayloom.environment" . | nindent 8 }}
      ports: {{- include "rayloom.ports" . | nindent 8 }}
      resources: {{- include "rayloom.resources" .group | nindent 8 }}
      {{- if not $isHead }}
      {{- /* Serve's proxy runs on the head alone, and the probe that the operator would put here asks for
             it. The head keeps the operator's probe: it must be ready before Serve is configured. */}}
      readinessProbe:
        httpGet:
          path: /api/healthz
          port: 52365
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      volumeMounts:
        - name: checkpoints
          mountPath: {{ $values.checkpoints.mountPath | quote }}
        - name: shm
          mountPath: /dev/shm
        {{- if and $isHead (not $values.database.existingSecret) }}
        - name: database
          mountPath: /database
        {{- end }}
  volumes:
    - name: checkpoints
      persistentVolumeClaim:
        claimName: {{ include "rayloom.claimName" $root | quote }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .group.shmSize | quote }}
    {{- if and $isHead (not $values.database.existingSecret) }}
    - name: database
      persistentVolumeClaim:
        claimName: {{ printf "%s-database" (include "rayloom.fullname" $root) | quote }}
    {{- end }}
{{- end -}}

{{/* Serve may build the application, and start its ingress, on any node: each has the key. */}}
{{- define "rayloom.environment" -}}
{{- if ne .context.Values.mode "job" }}
- name: RAYLOOM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "rayloom.apiSecretName" .context | quote }}
      key: {{ .context.Values.auth.api.key | quote }}
{{- end }}
{{- $database := .context.Values.database }}
{{- if and (eq .name "head") $database.existingSecret }}
- name: RAYLOOM_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ $database.existingSecret | quote }}
      key: {{ $database.key | quote }}
{{- end }}
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ .context.Values.drain.timeoutSeconds | quote }}
{{- if ne .context.Values.gcs.backend "memory" }}
# How long a node waits for a head that comes back, before it ends itself.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
{{- end }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- with .group.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The operator makes its Serve Service only where the head has a port of the name `serve`. */}}
{{- define "rayloom.ports" -}}
{{- if eq .name "head" -}}
{{- $config := include "rayloom.config" .context | fromYaml -}}
- name: gcs-server
  containerPort: 6379
  protocol: TCP
- name: dashboard
  containerPort: 8265
  protocol: TCP
- name: client
  containerPort: 10001
  protocol: TCP
- name: serve
  containerPort: {{ $config.service.port }}
  protocol: TCP
- name: rayloom-metrics
  containerPort: {{ $config.metrics.port }}
  protocol: TCP
{{ end -}}
- name: metrics
  containerPort: 8080
  protocol: TCP
{{- end -}}

{{- define "rayloom.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $_ := set $resources.requests .gpuResource (int .gpus) -}}
{{- $_ := set $resources.limits .gpuResource (int .gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
