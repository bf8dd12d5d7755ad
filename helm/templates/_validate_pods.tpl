{{/* Problems of the rendered pods, which also have the values that the chart itself sets. The API server does not check
     the pods, because they are part of the operator's object. */}}
{{- define "rayloom.podProblems" -}}
{{- $users := dict }}
{{- range $name := prepend (include "rayloom.workers" . | fromJsonArray) "head" }}
{{- $group := include "rayloom.group" (dict "context" $ "name" $name) | fromYaml }}
{{- $pod := (include "rayloom.podTemplate" (dict "context" $ "name" $name) | fromYaml).spec }}
{{- $volumes := list }}
{{- range $pod.volumes }}
{{- $volumes = append $volumes .name }}
{{- $sources := omit . "name" | keys | sortAlpha }}
{{- if ne (len $sources) 1 }}
- {{ printf "%s.volumes: got %s for %s, expected one source, such as configMap, secret or persistentVolumeClaim (without one, Kubernetes mounts an empty directory); name one" $name (join " and " $sources | default "no source") .name | quote }}
{{- end }}
{{- end }}
{{- include "rayloom.repetitions" (dict "key" (printf "%s.volumes" $name) "names" $volumes) }}
{{- include "rayloom.specProblems" (dict "name" $name "pod" $pod) }}
{{- include "rayloom.pathProblems" (dict "context" $ "name" $name "group" $group "pod" $pod) }}
{{- range $key := list "tmpSize" "homeSize" }}
{{- /* Kubernetes reads 0 as no limit. */}}
{{- if gt (include "rayloom.quantity" (index $group $key) | float64) 0.0 }}
{{- include "rayloom.sizeProblems" (dict "key" (printf "%s.%s" $name $key) "size" (index $group $key) "expected" ", or 0 for no limit: a pod that exceeds it is evicted") }}
{{- end }}
{{- end }}
{{- /* The operator's own containers have these names. */}}
{{- $containers := list "wait-gcs-ready" "autoscaler" }}
{{- range $key, $kind := dict "initContainers" $pod.initContainers "containers" $pod.containers }}
{{- range $kind }}
{{- $containers = append $containers .name }}
{{- $isRays := eq .name (first $pod.containers).name }}
{{- $where := ternary $name (printf "%s.%s.%s" $name (ternary "sidecars" $key (eq $key "containers")) .name) $isRays }}
{{- include "rayloom.containerProblems" (dict "where" $where "container" . "volumes" $volumes) }}
{{- end }}
{{- end }}
{{- include "rayloom.repetitions" (dict "key" (printf "%s.initContainers or sidecars" $name) "names" $containers) }}
{{- /* Without it, the image or the platform has a user, which the chart does not know. */}}
{{- with $group.podSecurityContext }}
{{- if not (kindIs "invalid" .runAsUser) }}{{- $_ := set $users (int64 .runAsUser | toString) $name }}{{- end }}
{{- end }}
{{- include "rayloom.groupProblems" (dict "context" $ "name" $name "group" $group "container" (first $pod.containers)) }}
{{- if or (hasKey $group.resources.requests $group.gpuResource) (hasKey $group.resources.limits $group.gpuResource) }}
- {{ printf "%s.resources: got %s, which the chart adds from gpus; set %s.gpus, and remove it here" $name $group.gpuResource $name | quote }}
{{- end }}
{{- /* The object store has 80% of it, and Ray does not start with a store of less than 75 MiB. */}}
{{- if lt (include "rayloom.quantity" $group.shmSize | float64) 98304000.0 }}
- {{ printf "%s.shmSize: got %v, expected at least 94Mi: 80%% of it is Ray's object store, of which Ray needs 75 MiB; raise it" $name $group.shmSize | quote }}
{{- end }}
{{- $memory := get $group.resources.limits "memory" }}
{{- if and $memory (ge (include "rayloom.quantity" $group.shmSize | float64) (include "rayloom.quantity" $memory | float64)) }}
- {{ printf "%s.shmSize: got %v, expected less than the memory limit, %v, because /dev/shm counts as memory; lower it or raise the limit" $name $group.shmSize $memory | quote }}
{{- end }}
{{- end }}
{{- $ids := keys $users | sortAlpha }}
{{- /* The files of an existing volume may have a fixed owner, whoever writes them. */}}
{{- if and (gt (len $ids) 1) (or (empty $.Values.checkpoints.existingClaim) (has "0" $ids)) }}
- {{ printf "podSecurityContext.runAsUser: got %s for %s and %s for %s, expected the same for all: all pods write to one volume, and only the user that created a file or a directory there can change it (fsGroup does not help, because new files are not writable by their group); set it in pods" (first $ids) (get $users (first $ids)) (last $ids) (get $users (last $ids)) | quote }}
{{- end }}
{{- end -}}

{{/* Values that the API server refuses in a pod although their types are right. The operator would try to create such
     a pod again and again. Takes: name, pod (its specification). */}}
{{- define "rayloom.specProblems" -}}
{{- $name := .name }}
{{- range .pod.tolerations }}
{{- $operator := default "Equal" .operator }}
{{- if and (eq $operator "Exists") .value }}
- {{ printf "%s.tolerations: got the value %s with operator Exists, expected none: it tolerates any value; remove the value, or set the operator to Equal" $name .value | quote }}
{{- end }}
{{- if and (eq $operator "Equal") (not .key) }}
- {{ printf "%s.tolerations: got operator Equal without a key, expected a key; name the key of the taint, or set the operator to Exists, which without a key tolerates every taint" $name | quote }}
{{- end }}
{{- if and (hasKey . "tolerationSeconds") (ne (default "" .effect) "NoExecute") }}
- {{ printf "%s.tolerations: got tolerationSeconds with the effect %s, expected NoExecute, the only effect that evicts pods; set it, or remove tolerationSeconds" $name (default "none" .effect) | quote }}
{{- end }}
{{- end }}
{{- range .pod.topologySpreadConstraints }}
{{- if lt (int .maxSkew) 1 }}
- {{ printf "%s.topologySpreadConstraints: got maxSkew %v, expected at least 1; raise it" $name .maxSkew | quote }}
{{- end }}
{{- if not (has .whenUnsatisfiable (list "DoNotSchedule" "ScheduleAnyway")) }}
- {{ printf "%s.topologySpreadConstraints: got whenUnsatisfiable %s, expected DoNotSchedule or ScheduleAnyway; choose one" $name .whenUnsatisfiable | quote }}
{{- end }}
{{- end }}
{{- range .pod.hostAliases }}
{{- if not (regexMatch "^(((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])|[0-9a-fA-F:]*:[0-9a-fA-F:.]+)$" (default "" .ip)) }}
- {{ printf "%s.hostAliases: got the ip %s, expected an address such as 10.0.0.1; put names into hostnames" $name (default "none" .ip) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Files of the configuration that a group's pods cannot have. All pods load the model, and the head reads all other
     files. Takes: context, name, group, pod (its specification). */}}
{{- define "rayloom.pathProblems" -}}
{{- $files := .context.Values.workspace.files }}
{{- range $key, $path := include "rayloom.configPaths" .context | fromJson }}
{{- if not (isAbs $path) }}
{{- if eq $.name "head" }}
- {{ printf "config.%s: got %s, expected an absolute path in the pods, which do not have the files of your machine; put a file into workspace.files, or mount a volume by pods.volumes and pods.volumeMounts, and name the path in the pods, such as /workspace/%s" $key $path (base $path) | quote }}
{{- end }}
{{- else if or (eq $.name "head") (eq $key "model.path") }}
{{- $container := first $.pod.containers }}
{{- /* Your own image may have files in any directory; Rayloom's has none in /workspace. */}}
{{- $isRayloomsImage := hasPrefix (printf "rayloom:%s-" $.context.Chart.AppVersion) $container.image }}
{{- $isThere := not (and $isRayloomsImage (hasPrefix "/workspace/" (printf "%s/" (clean $path)))) }}
{{- $isMounted := false }}
{{- range $container.volumeMounts }}
{{- $inside := trimPrefix (printf "%s/" (clean .mountPath)) (printf "%s/" (clean $path)) | trimSuffix "/" }}
{{- $isIn := hasPrefix (printf "%s/" (clean .mountPath)) (printf "%s/" (clean $path)) }}
{{- /* An init container may put files into a directory that is empty at the pod's start. */}}
{{- $isFilled := or $.group.initContainers (not (has .name (list "shm" "tmp" "home" "secrets" "database"))) }}
{{- $isKnown := or (ne .name "workspace") (not $files) (eq $inside "") (hasKey $files $inside) }}
{{- if $isIn }}
{{- $isThere = and $isFilled $isKnown | or (and $isMounted $isThere) }}
{{- $isMounted = true }}
{{- end }}
{{- end }}
{{- if not $isThere }}
- {{ printf "config.%s: got %s, which the pods of %s do not have, expected a path on one of their volumes%s; add the file to workspace.files, or mount its volume by pods.volumes and pods.volumeMounts" $key $path $.name (empty $files | ternary "" (printf " (workspace.files has %s)" (join ", " (keys $files | sortAlpha)))) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The paths of files and directories in the configuration, by their keys, as JSON. */}}
{{- define "rayloom.configPaths" -}}
{{- $config := eq .Values.mode "cluster" | ternary dict (include "rayloom.sentConfig" . | fromYaml) -}}
{{- $paths := dict -}}
{{- $models := dict "model.path" (dig "model" "path" "" $config) "algorithm.reference" (dig "algorithm" "reference" "" $config) "algorithm.critic.model" (dig "algorithm" "critic" "model" "" $config) -}}
{{- range $key, $path := $models }}
{{- if regexMatch "^[/.~]" (default "" $path) }}{{- $_ := set $paths $key $path -}}{{- end -}}
{{- end -}}
{{- $sections := dict "tasks" (dig "tasks" dict $config) -}}
{{- range $name, $part := dig "mixture" dict $config }}{{- $_ := set $sections (printf "mixture.%s.tasks" $name) (dig "tasks" dict $part) -}}{{- end -}}
{{- range $name, $set := dig "evaluation" "sets" dict $config }}{{- $_ := set $sections (printf "evaluation.sets.%s" $name) $set -}}{{- end -}}
{{- range $section, $tasks := $sections -}}
{{- with $tasks.file }}{{- $_ := set $paths (printf "%s.file" $section) . -}}{{- end -}}
{{- $dataset := default "" $tasks.dataset -}}
{{- if and (not (contains "://" $dataset)) (regexMatch "(?i)^[/.~]|[.](jsonl|ndjson|json|csv|tsv|parquet)([.]gz)?$" $dataset) -}}
{{- $_ := set $paths (printf "%s.dataset" $section) $dataset -}}
{{- end -}}
{{- end -}}
{{- $paths | toJson -}}
{{- end -}}

{{/* Contradictions between a group's values. Takes: context, name, group, container (Ray's). */}}
{{- define "rayloom.groupProblems" -}}
{{- $name := .name }}
{{- $group := .group }}
{{- $user := toString $group.podSecurityContext.runAsUser }}
{{- $added := dig "capabilities" "add" list $group }}
{{- if and $added (ne $user "0") }}
- {{ printf "%s.capabilities: got %s for user %s, expected runAsUser 0: Linux gives added capabilities only to processes of root; to lock memory for RDMA raise the nodes' limit (LimitMEMLOCK=infinity of the container runtime), or set pods.podSecurityContext.runAsUser to 0" $name (join ", " $added) (ternary "of the image" $user (eq $user "<nil>")) | quote }}
{{- end }}
{{- if and $group.hostNetwork .context.Values.networkPolicy.enabled }}
- {{ printf "%s.hostNetwork: got true with networkPolicy.enabled: a network policy selects pods by their own addresses, and would block this one; disable one of them" $name | quote }}
{{- end }}
{{- if and (eq $group.dnsPolicy "None") (not (dig "nameservers" list $group.dnsConfig)) }}
- {{ printf "%s.dnsPolicy: got None without dnsConfig.nameservers; expected name servers; add some, or choose another policy" $name | quote }}
{{- end }}
{{- range $kind := list "livenessProbe" "readinessProbe" "startupProbe" }}
{{- $probe := get $.container $kind | default dict }}
{{- $asked := list }}
{{- range list "exec" "grpc" "httpGet" "tcpSocket" }}{{- if hasKey $probe . }}{{- $asked = append $asked . }}{{- end }}{{- end }}
{{- if gt (len $asked) 1 }}
- {{ printf "%s.%s: got %s, expected only one of them; remove the others, here or in pods" $name $kind (join " and " $asked) | quote }}
{{- end }}
{{- if and (ne $kind "readinessProbe") (ne (int (default 1 $probe.successThreshold)) 1) }}
- {{ printf "%s.%s.successThreshold: got %v, expected 1, the only value that Kubernetes allows for this probe; remove it" $name $kind $probe.successThreshold | quote }}
{{- end }}
{{- end }}
{{- $claims := list }}
{{- range $group.resourceClaims }}
{{- $claims = append $claims .name }}
{{- if eq (empty .resourceClaimName) (empty .resourceClaimTemplateName) }}
- {{ printf "%s.resourceClaims: %s has both or neither of resourceClaimName and resourceClaimTemplateName, expected one; for several pods use resourceClaimTemplateName, which makes a claim for each pod" $name .name | quote }}
{{- end }}
{{- end }}
{{- include "rayloom.repetitions" (dict "key" (printf "%s.resourceClaims" $name) "names" $claims) }}
{{- range $group.resources.claims }}
{{- if not (has .name $claims) }}
- {{ printf "%s.resources.claims: got %s, expected a name from resourceClaims (%s); add it there, or to pods.resourceClaims" $name .name (join ", " $claims | default "none") | quote }}
{{- end }}
{{- end }}
{{- if and $group.gpus (not $group.gpuResource) (not $group.resources.claims) }}
- {{ printf "%s.gpuResource: got none, and resources.claims has none, with %v gpus; expected one of the two, otherwise Kubernetes gives the pod no GPU" $name $group.gpus | quote }}
{{- end }}
{{- end -}}

{{/* Names that occur more than once. Takes: key (that has the names), names. */}}
{{- define "rayloom.repetitions" -}}
{{- range include "rayloom.repeated" .names | fromJsonArray }}
- {{ printf "%s: %s is set twice, or is also set by the chart; expected it once: remove one, here or in pods" $.key . | quote }}
{{- end }}
{{- end -}}

{{/* Problems of a container's variables, mounts and resources. Takes: where (the container's key), container, volumes
     (the names of the pod's volumes). */}}
{{- define "rayloom.containerProblems" -}}
{{- $operators := list "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "RAY_enable_autoscaler_v2" -}}
{{- /* The operator sets these only in Ray's container; a sidecar may have them. */}}
{{- if not (contains "." .where) }}{{- $operators = concat $operators (list "RAY_ADDRESS" "RAY_PORT" "RAY_IP" "FQ_RAY_IP" "RAY_CLUSTER_NAME" "RAY_NODE_TYPE_NAME") -}}{{- end -}}
{{- $inFiles := dict "RAYLOOM_API_KEY" "auth.api.existingSecret" "RAYLOOM_DATABASE_URL" "database.existingSecret" -}}
{{- $where := .where -}}
{{- $variables := list }}
{{- range .container.env }}
{{- $variables = append $variables .name }}
{{- if has .name $operators }}
- {{ printf "%s.env: %s is set by the operator, expected no other value: remove it (see auth and gcs)" $where .name | quote }}
{{- end }}
{{- if hasKey $inFiles .name }}
- {{ printf "%s.env: %s must not be a variable: pods read it from a file, which Kubernetes updates when the Secret changes; name the Secret by %s" $where .name (get $inFiles .name) | quote }}
{{- end }}
{{- end }}
{{- $paths := list }}
{{- range .container.volumeMounts }}
{{- $paths = append $paths (clean .mountPath) }}
{{- if not (isAbs .mountPath) }}
- {{ printf "%s.volumeMounts: %s is mounted at %s, expected an absolute path, such as /%s; correct it" $where .name .mountPath .mountPath | quote }}
{{- end }}
{{- if not (has .name $.volumes) }}
- {{ printf "%s.volumeMounts: %s is mounted at %s, but the volume does not exist; add it to the group's volumes or to pods.volumes" $where .name .mountPath | quote }}
{{- end }}
{{- end }}
{{- include "rayloom.repetitions" (dict "key" (printf "%s.env" $where) "names" $variables) }}
{{- include "rayloom.repetitions" (dict "key" (printf "%s.volumeMounts" $where) "names" $paths) }}
{{- $resources := default dict .container.resources }}
{{- $requests := default dict $resources.requests }}
{{- $limits := default dict $resources.limits }}
{{- range $name, $_ := merge (deepCopy $requests) $limits }}
{{- $request := get $requests $name }}
{{- $limit := get $limits $name }}
{{- /* If there is a limit without a request, Kubernetes uses the limit as the request. */}}
{{- if and (contains "/" $name) (hasKey $requests $name) (ne (toString $request) (toString $limit)) }}
- {{ printf "%s.resources: got a request of %v and a limit of %v for %s, expected equal values: Kubernetes does not overcommit it" $where (default "none" $request) (default "none" $limit) $name | quote }}
{{- else if and (hasKey $requests $name) (hasKey $limits $name) (gt (include "rayloom.quantity" $request | float64) (include "rayloom.quantity" $limit | float64)) }}
- {{ printf "%s.resources.requests.%s: got %v, expected at most the limit, %v; lower the first or raise the second" $where $name $request $limit | quote }}
{{- end }}
{{- end }}
{{- end -}}
