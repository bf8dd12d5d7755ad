{{/* A group's values: those of pods, which the group's own values extend or override. Takes: context, name. */}}
{{- define "rayloom.group" -}}
{{- $group := deepCopy .context.Values.pods -}}
{{- range $key, $own := deepCopy (index .context.Values .name) -}}
{{- if kindIs "slice" $own -}}
{{- $own = concat (get $group $key | default list) $own -}}
{{- else if kindIs "map" $own -}}
{{- $own = mergeOverwrite (get $group $key | default dict) $own -}}
{{- end -}}
{{- $_ := set $group $key $own -}}
{{- end -}}
{{- toYaml $group -}}
{{- end -}}

{{/* The pod template of one group. Takes: context, name.

     The template must contain neither the chart's version nor a checksum: the operator compares pod templates,
     and would require a new cluster for every release. */}}
{{- define "rayloom.podTemplate" -}}
{{- $root := .context -}}
{{- $values := $root.Values -}}
{{- $isHead := eq .name "head" -}}
{{- $group := include "rayloom.group" . | fromYaml -}}
{{- $pod := dict "context" $root "name" .name "group" $group -}}
{{- $own := include "rayloom.groupLabels" $pod | fromYaml -}}
metadata:
  labels: {{- mergeOverwrite $group.labels $own | toYaml | nindent 4 }}
  {{- with $group.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "rayloom.serviceAccountName" $pod | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # On the head, the run ends first, and then Ray's node.
  terminationGracePeriodSeconds: {{ add (mul $values.drain.timeoutSeconds (ternary 2 1 $isHead)) 30 }}
  securityContext: {{- include "rayloom.podSecurity" $group.podSecurityContext | nindent 4 }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "dnsConfig" "hostAliases" "hostNetwork" "resourceClaims" }}
  {{- with index $group $key }}
  {{ $key }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- /* By default, a pod on the node's network uses the node's name servers, which do not know the head. */}}
  {{- with default (ternary "ClusterFirstWithHostNet" "" $group.hostNetwork) $group.dnsPolicy }}
  dnsPolicy: {{ . }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $counted := hasKey . "labelSelector" | ternary (dict) (dict "labelSelector" (dict "matchLabels" $own)) }}
    - {{- merge $counted . | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- $init := concat $group.initContainers (include "rayloom.modelDownload" $pod | fromYamlArray) }}
  {{- with $init }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $isHead }}
      {{- $image := include "rayloom.imageOf" $pod | fromYaml }}
      image: {{ $image.name | quote }}
      imagePullPolicy: {{ $image.pullPolicy }}
      securityContext: {{- include "rayloom.containerSecurity" $group | nindent 8 }}
      env: {{- include "rayloom.variables" $pod | nindent 8 }}
      {{- with $group.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports: {{- include "rayloom.ports" $pod | nindent 8 }}
      resources: {{- include "rayloom.resources" $group | nindent 8 }}
      {{- if $isHead }}
      lifecycle:
        preStop:
          exec:
            # The current step has half of the workers' drain time, because the workers may be stopped at the
            # same time; the other half is for the checkpoint.
            command: [rayloom, stop, --grace, {{ div $values.drain.timeoutSeconds 2 | quote }}]
      {{- end }}
      {{- with include "rayloom.probes" $pod | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      volumeMounts: {{- include "rayloom.mounts" $pod | nindent 8 }}
    {{- with $group.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes: {{- include "rayloom.volumes" $pod | nindent 4 }}
{{- end -}}

{{/* The hash of a group's pod template. It is a label of the group's Ray nodes, and shows from which template a
     node was made. Takes: context, name. */}}
{{- define "rayloom.templateHash" -}}
{{- include "rayloom.podTemplate" . | fromYaml | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{- define "rayloom.groupLabels" -}}
{{ include "rayloom.selectorLabels" .context }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{/* The security context of a pod; the platform chooses ids that are null. Takes: a group's podSecurityContext. */}}
{{- define "rayloom.podSecurity" -}}
runAsNonRoot: {{ ne (toString .runAsUser) "0" }}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }}: {{ toJson $value }}
{{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "rayloom.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .readOnlyRootFilesystem }}
capabilities:
  drop: [ALL]
  {{- with dig "capabilities" "add" list . }}
  add: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Probes of Ray's container. Workers always have a readiness probe from the chart, because the operator's probe would
     ask for Serve's proxy, which runs only on the head. The operator adds the probes that are missing here: the head's
     readiness probe (the head must be ready before Serve is configured) and the liveness probes. A probe that has
     periods but no request asks Ray's agent, as the operator's probes do. Takes: name, group. */}}
{{- define "rayloom.probes" -}}
{{- $defaults := dict
      "readinessProbe" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 6)
      "livenessProbe" (dict "initialDelaySeconds" 30 "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 120)
      "startupProbe" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 60) -}}
{{- $group := .group -}}
{{- $needed := ternary "" "readinessProbe" (eq .name "head") -}}
{{- range $kind, $default := $defaults }}
{{- $own := get $group $kind }}
{{- if or $own (eq $kind $needed) }}
{{- $probe := mergeOverwrite (deepCopy $default) $own }}
{{- if not (or $own.exec $own.grpc $own.httpGet $own.tcpSocket) }}
{{- $_ := set $probe "httpGet" (dict "path" "/api/healthz" "port" 52365) }}
{{- end }}
{{ $kind }}: {{- toYaml $probe | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A variable from a Secret. Takes: name, secret, key. */}}
{{- define "rayloom.secretVariable" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret | quote }}
      key: {{ .key | quote }}
{{- end -}}

{{/* The Secrets that a pod reads from files. Kubernetes replaces the files when a Secret changes, and processes use the
     new value without a restart. Takes: context, name (of the group). */}}
{{- define "rayloom.secretSources" -}}
{{- $values := .context.Values -}}
{{- if ne $values.mode "job" }}
- secret:
    name: {{ include "rayloom.apiSecretName" .context | quote }}
    items: [{key: {{ $values.auth.api.key | quote }}, path: api-key}]
{{- end }}
{{- if and (eq .name "head") $values.database.existingSecret }}
- secret:
    name: {{ $values.database.existingSecret | quote }}
    items: [{key: {{ $values.database.key | quote }}, path: database-url}]
{{- end }}
{{- end -}}

{{/* The variables of a pod. Only the head has the database. Every pod has the API's key, because Serve may build the
     application, and start its ingress, on any node. Every pod can read the models, because actors of every group
     load the tokenizer. */}}
{{- define "rayloom.variables" -}}
{{- $values := .context.Values -}}
{{- if ne $values.mode "job" }}
- name: RAYLOOM_API_KEY_FILE
  value: /secrets/api-key
# The middleware before every route of Ray Serve's proxy.
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
  value: service.api.door.middlewares
{{- end }}
{{- if and (eq .name "head") $values.database.existingSecret }}
- name: RAYLOOM_DATABASE_URL_FILE
  value: /secrets/database-url
{{- end }}
{{- include "rayloom.home" . | nindent 0 }}
{{- if $values.modelCache.enabled }}
- name: HF_HOME
  value: {{ $values.modelCache.mountPath | quote }}
{{- end }}
{{- if and $values.modelCache.enabled (include "rayloom.hubContents" .context | fromJsonArray) }}
# Only the head's init container uses the hub, and has the hub's token.
- name: HF_HUB_OFFLINE
  value: "1"
{{- else }}
{{- include "rayloom.hubToken" .context | nindent 0 }}
{{- end }}
{{- if include "rayloom.hasWorkspace" .context }}
- name: PYTHONPATH
  value: {{ $values.workspace.mountPath | quote }}
{{- end }}
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ $values.drain.timeoutSeconds | quote }}
{{- if ne $values.gcs.backend "memory" }}
# Seconds that a node waits for a restarted head before the node ends itself.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
{{- end }}
{{- /* Without RAY_ROTATION_MAX_BYTES, the files of Ray's workers grow without a limit. */}}
{{- $own := list }}
{{- range .group.env }}{{- $own = append $own .name }}{{- end }}
{{- range $name, $value := dict "RAY_ROTATION_MAX_BYTES" (mul 16 1048576) "RAY_ROTATION_BACKUP_COUNT" 2 }}
{{- if not (has $name $own) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Without this variable Ray reports 0 % for the disk of every pod.
- name: RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE
  value: "1"
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- with .group.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The image's own home directory is in /tmp, which is smaller. */}}
{{- define "rayloom.home" -}}
- name: HOME
  value: /home/rayloom
{{- end -}}

{{- define "rayloom.hubToken" -}}
{{- with .Values.hub -}}
{{- if .existingSecret -}}
{{- include "rayloom.secretVariable" (dict "name" "HF_TOKEN" "secret" .existingSecret "key" .key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The ports of a pod. The operator makes its Serve Service only if the head has a port named `serve`; its own
     PodMonitors read the ports as-metrics and dash-metrics. */}}
{{- define "rayloom.ports" -}}
{{- $ports := dict "metrics" 8080 -}}
{{- if eq .name "head" -}}
{{- $config := include "rayloom.config" .context | fromYaml -}}
{{- $ports = dict "gcs-server" 6379 "dashboard" 8265 "client" 10001 "metrics" 8080 "as-metrics" 44217
      "dash-metrics" 44227 "serve" $config.service.port "rayloom-metrics" $config.metrics.port -}}
{{- end -}}
{{- range $name, $port := $ports }}
- name: {{ $name }}
  containerPort: {{ $port }}
  protocol: TCP
{{- end }}
{{- end -}}

{{- define "rayloom.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- /* If gpuResource is empty, resource claims request the GPUs. */}}
{{- if and .gpus .gpuResource -}}
{{- $_ := set $resources.requests .gpuResource (int .gpus) -}}
{{- $_ := set $resources.limits .gpuResource (int .gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The mounts of a pod. If the root file system is read-only, only /tmp, the home directory and the volumes can be
     written. Ray's session, spilled objects and torch's compiled code are in /tmp; models, and the caches of vLLM,
     Triton and FlashInfer, are in the home directory. */}}
{{- define "rayloom.mounts" -}}
{{- $values := .context.Values -}}
- name: checkpoints
  mountPath: {{ $values.checkpoints.mountPath | quote }}
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/rayloom
{{- if include "rayloom.secretSources" . | fromYamlArray }}
# A whole directory, because a single file mounted by subPath would not change with the Secret.
- name: secrets
  mountPath: /secrets
  readOnly: true
{{- end }}
{{- if and (eq .name "head") (not $values.database.existingSecret) }}
- name: database
  mountPath: /database
{{- end }}
{{- if $values.modelCache.enabled }}
- name: models
  mountPath: {{ $values.modelCache.mountPath | quote }}
{{- end }}
{{- if include "rayloom.hasWorkspace" .context }}
- name: workspace
  mountPath: {{ $values.workspace.mountPath | quote }}
  readOnly: true
{{- end }}
{{- with .group.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rayloom.volumes" -}}
{{- $values := .context.Values -}}
{{- $name := include "rayloom.fullname" .context -}}
- name: checkpoints
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-checkpoints" $name) $values.checkpoints.existingClaim | quote }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "rayloom.size" .group.shmSize }}
- name: tmp
  emptyDir:
    sizeLimit: {{ include "rayloom.size" .group.tmpSize }}
- name: home
  emptyDir:
    sizeLimit: {{ include "rayloom.size" .group.homeSize }}
{{- with include "rayloom.secretSources" . | fromYamlArray }}
- name: secrets
  projected:
    sources: {{- toYaml . | nindent 6 }}
{{- end }}
{{- if and (eq .name "head") (not $values.database.existingSecret) }}
- name: database
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-database" $name) $values.database.existingClaim | quote }}
{{- end }}
{{- if $values.modelCache.enabled }}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" $name) $values.modelCache.existingClaim | quote }}
{{- end }}
{{- with $values.workspace }}
{{- if .existingClaim }}
- name: workspace
  persistentVolumeClaim:
    claimName: {{ .existingClaim | quote }}
    readOnly: true
{{- else if or .existingConfigMap .files }}
- name: workspace
  configMap:
    name: {{ default (printf "%s-workspace" $name) .existingConfigMap | quote }}
{{- end }}
{{- end }}
{{- with .group.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rayloom.hasWorkspace" -}}
{{- with .Values.workspace -}}
{{- if or .files .existingConfigMap .existingClaim -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The names of the models that the configuration takes from a hub, as JSON. */}}
{{- define "rayloom.hubModels" -}}
{{- $config := include "rayloom.sentConfig" . | fromYaml -}}
{{- $models := list -}}
{{- range list (dig "model" "path" "" $config) (dig "algorithm" "reference" "" $config) (dig "algorithm" "critic" "model" "" $config) -}}
{{- if and . (not (regexMatch "^[/.~]" .)) -}}{{- $models = append $models . -}}{{- end -}}
{{- end -}}
{{- uniq $models | toJson -}}
{{- end -}}

{{/* The splits of data sets that the configuration takes from a hub, as JSON: name, subset and split of each. They are
     found in the tasks, a mixture's parts and the evaluation sets, as service/config/tasks.py reads these. */}}
{{- define "rayloom.hubDataSets" -}}
{{- $config := include "rayloom.sentConfig" . | fromYaml -}}
{{- $own := dig "tasks" dict $config -}}
{{- $all := list $own -}}
{{- range $part := dig "mixture" dict $config }}{{- $all = append $all (dig "tasks" dict $part) -}}{{- end -}}
{{- range $set := dig "evaluation" "sets" dict $config -}}
{{- if and (not $set.file) (or $set.dataset $set.subset $set.split $set.columns) -}}
{{- $all = append $all (dict
      "dataset" (default $own.dataset $set.dataset)
      "subset" (default (ternary nil $own.subset (not (empty $set.dataset))) $set.subset)
      "split" (default $own.split $set.split)) -}}
{{- end -}}
{{- end -}}
{{- $found := list -}}
{{- range $tasks := $all -}}
{{- if and $tasks.dataset (regexMatch "^[A-Za-z0-9][^/]*(/[^/]+)?$" $tasks.dataset) (not (regexMatch "(?i)[.](jsonl|ndjson|json|csv|tsv|parquet)([.]gz)?$" $tasks.dataset)) -}}
{{- range $split := compact (list (default "train" $tasks.split) $tasks.evaluation_split) -}}
{{- $found = append $found (dict "name" $tasks.dataset "subset" (default "" $tasks.subset) "split" $split) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- uniq $found | toJson -}}
{{- end -}}

{{/* The models and the splits of data sets that are fetched from a hub, each with its revision, as JSON. */}}
{{- define "rayloom.hubContents" -}}
{{- $found := list -}}
{{- range $name := include "rayloom.hubModels" . | fromJsonArray }}{{- $found = append $found (dict "name" $name) -}}{{- end -}}
{{- $revisions := .Values.modelCache.revisions -}}
{{- $pinned := list -}}
{{- range $each := concat $found (include "rayloom.hubDataSets" . | fromJsonArray) -}}
{{- $pinned = append $pinned (merge (dict "revision" (get $revisions $each.name)) $each) -}}
{{- end -}}
{{- $pinned | toJson -}}
{{- end -}}

{{/* The init container that downloads models, as a list. Only the head has it, because workers start after the head.
     If it exceeds its deadline, it is ended, and Kubernetes starts it again after a growing pause. It has the pod's own
     variables and volumes (for a proxy or certificates), and starts after the pod's own init containers, which may
     provide them. */}}
{{- define "rayloom.modelDownload" -}}
{{- $contents := include "rayloom.hubContents" .context -}}
{{- $cache := .context.Values.modelCache -}}
{{- if and (eq .name "head") $cache.enabled (ne $contents "[]") }}
- name: fetch-models
  {{- $image := include "rayloom.imageOf" . | fromYaml }}
  image: {{ $image.name | quote }}
  imagePullPolicy: {{ $image.pullPolicy }}
  securityContext: {{- include "rayloom.containerSecurity" (omit .group "capabilities") | nindent 4 }}
  command: [timeout, --kill-after=30, {{ $cache.downloadTimeoutSeconds | quote }}, python, -c]
  args:
    - {{ .context.Files.Get "files/fetch.py" | toJson }}
    - {{ $contents | toJson }}
  env:
    {{- include "rayloom.home" . | nindent 4 }}
    - name: HF_HOME
      value: {{ $cache.mountPath | quote }}
    {{- include "rayloom.hubToken" .context | nindent 4 }}
    {{- with .group.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .group.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  resources: {{- include "rayloom.resources" .group | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: {{ $cache.mountPath | quote }}
    - name: tmp
      mountPath: /tmp
    - name: home
      mountPath: /home/rayloom
    {{- with .group.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}
