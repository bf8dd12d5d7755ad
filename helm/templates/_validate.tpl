{{/* Checks that only the chart can make: contradictions among the values, and between the configuration and the pods.
     _validate_pods.tpl checks the pods. `rayloom check` checks the configuration without the chart. Every message names
     the key, what was got, what was expected and what to do. All problems are reported together. */}}
{{- define "rayloom.validate" -}}
{{- $problems := concat
      (include "rayloom.nameProblems" . | fromYamlArray)
      (include "rayloom.keyProblems" . | fromYamlArray)
      (include "rayloom.valueProblems" . | fromYamlArray)
      (include "rayloom.imageProblems" . | fromYamlArray)
      (include "rayloom.labelProblems" . | fromYamlArray)
      (include "rayloom.mountProblems" . | fromYamlArray)
      (include "rayloom.podProblems" . | fromYamlArray)
      (include "rayloom.placeProblems" . | fromYamlArray)
      (include "rayloom.configProblems" . | fromYamlArray)
      (include "rayloom.accessProblems" . | fromYamlArray)
      (include "rayloom.alertProblems" . | fromYamlArray)
      (include "rayloom.runningProblems" . | fromYamlArray) -}}
{{- if $problems -}}
{{- fail (printf "these values are refused:\n  - %s" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "rayloom.nameProblems" -}}
{{- if and (hasKey .Values "enabled") (not .Values.enabled) }}
- "enabled: got false, which only an umbrella chart reads, as the condition of this chart; expected true here: do not install the chart, or remove its pods by suspend"
{{- end }}
{{- $name := include "rayloom.fullname" . -}}
{{- if gt (len $name) 47 }}
- {{ printf "fullnameOverride: the name %s has %d characters, expected at most 47, as the operator lengthens it; choose a shorter release name or set fullnameOverride" $name (len $name) | quote }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
- {{ printf "fullnameOverride: got the name %s, expected small letters, digits and hyphens, beginning with a letter; choose another release name or set fullnameOverride" $name | quote }}
{{- end }}
{{- end -}}

{{/* Keys that other charts have and this chart does not have, with the reason. The schema accepts them, so that this
     check can give the reason. */}}
{{- define "rayloom.keyProblems" -}}
{{- $ids := "expected the ids of the user and of the groups in podSecurityContext, such as {runAsUser: 1000, fsGroup: 1000, supplementalGroups: [5000]}; put it there" -}}
{{- $scale := "expected replicas: a run starts all of its parts at the beginning and keeps them, so Ray's autoscaler would never add or remove a pod (it also needs a token of the API server, which no pod has); set replicas, and change it while the run is suspended" -}}
{{- range $group := list "pods" "head" "inference" "trainer" "environment" }}
{{- $given := index $.Values $group }}
{{- range $key := list "fsGroup" "supplementalGroups" }}
{{- if hasKey $given $key }}
- {{ printf "%s.%s: is not a key of this chart, %s" $group $key $ids | quote }}
{{- end }}
{{- end }}
{{- if hasKey $given "securityContext" }}
- {{ printf "%s.securityContext: is not a key of this chart, %s; the container's settings are capabilities and readOnlyRootFilesystem" $group $ids | quote }}
{{- end }}
{{- if or (hasKey $given "minReplicas") (hasKey $given "maxReplicas") }}
- {{ printf "%s.minReplicas, maxReplicas: are not keys of this chart, %s" $group $scale | quote }}
{{- end }}
{{- end }}
{{- range $key, $given := .Values }}
{{- if regexMatch "^(head|inference|trainer|environment)(s|[-_A-Z0-9].*)$" $key }}
- {{ printf "%s: is not a key of this chart, expected one group of equal pods for each of the roles head, inference, trainer and environment; put its values into %s" $key (regexFind "^(head|inference|trainer|environment)" $key) | quote }}
{{- end }}
{{- end }}
{{- if hasKey .Values.checkpoints "uri" }}
- "checkpoints.uri: is not a key of this chart, expected a volume: a finished checkpoint is a renamed directory, and object stores cannot rename directories; name a storage class, or a claim by existingClaim"
{{- end }}
{{- if hasKey .Values "tags" }}
- "tags: helm reads this key only at the top of an umbrella chart's values, where it selects subcharts; expected none here: move it there, or remove it"
{{- end }}
{{- if hasKey (dig "model" dict .Values.config) "revision" }}
- "config.model.revision: is not a key of this chart, expected the commit by the model's name in modelCache.revisions, such as {Qwen/Qwen3-0.6B: 40 digits}, with modelCache.enabled; put it there"
{{- end }}
{{- range list "checkpoints" "modelCache" }}
{{- $modes := empty (index $.Values .).existingClaim | ternary (index $.Values .).accessModes list }}
{{- if has "ReadWriteOncePod" $modes }}
- {{ printf "%s.accessModes: got ReadWriteOncePod, expected ReadWriteMany, or ReadWriteOnce on one node: every pod mounts the volume, but this mode allows only one pod" . | quote }}
{{- end }}
{{- if has "ReadOnlyMany" $modes }}
- {{ printf "%s.accessModes: got ReadOnlyMany, expected ReadWriteMany, or ReadWriteOnce on one node: pods write to it; if the models are already on a volume, name it by modelCache.existingClaim" . | quote }}
{{- end }}
{{- end }}
{{- range $mode := .Values.database.accessModes }}
{{- if not (hasPrefix "ReadWriteOnce" $mode) }}
- {{ printf "database.accessModes: got %s, expected ReadWriteOnce or ReadWriteOncePod: only the head uses the database, and SQLite breaks on a network file system; choose one of them" $mode | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Integers that are too large: helm reads each number as a 64-bit float, and would change them silently. And volumes
     that are too small. */}}
{{- define "rayloom.valueProblems" -}}
{{- range $key := list "config" "test" "extraManifests" -}}
{{- include "rayloom.largeIntegers" (dict "path" $key "value" (index $.Values $key)) -}}
{{- end -}}
{{- /* The sizes of claims that the chart makes. */}}
{{- $sizes := dict }}
{{- if not .Values.checkpoints.existingClaim }}{{- $_ := set $sizes "checkpoints.size" .Values.checkpoints.size }}{{- end }}
{{- if not (or .Values.database.existingSecret .Values.database.existingClaim) }}{{- $_ := set $sizes "database.size" .Values.database.size }}{{- end }}
{{- if and .Values.modelCache.enabled (not .Values.modelCache.existingClaim) }}{{- $_ := set $sizes "modelCache.size" .Values.modelCache.size }}{{- end }}
{{- if eq .Values.gcs.backend "rocksdb" }}{{- $_ := set $sizes "gcs.storage.size" .Values.gcs.storage.size }}{{- end }}
{{- range $key, $size := $sizes }}
{{- include "rayloom.sizeProblems" (dict "key" $key "size" $size "expected" "") }}
{{- end }}
{{- end -}}

{{/* A size that is too small, probably because its unit is missing. Takes: key, size, expected (more of what is
     expected). */}}
{{- define "rayloom.sizeProblems" -}}
{{- $bytes := include "rayloom.quantity" .size | float64 }}
{{- if lt $bytes 67108864.0 }}
- {{ printf "%s: got %v, which is %.0f bytes, expected at least 64Mi%s; %s" .key .size $bytes .expected (regexMatch "[0-9m]$" (toString .size) | ternary "write the unit, such as 20Gi" "raise it") | quote }}
{{- end }}
{{- end -}}

{{- define "rayloom.largeIntegers" -}}
{{- if or (kindIs "map" .value) (kindIs "slice" .value) -}}
{{- $path := .path -}}
{{- range $key, $value := .value -}}
{{- include "rayloom.largeIntegers" (dict "path" (printf "%s.%v" $path $key) "value" $value) -}}
{{- end -}}
{{- else if or (kindIs "float64" .value) (kindIs "int64" .value) (kindIs "int" .value) -}}
{{- $number := float64 .value -}}
{{- if or (ge $number 9007199254740992.0) (le $number -9007199254740992.0) }}
- {{ printf "%s: got %.0f, expected a number between -2^53 and 2^53: helm rounds larger integers, so this may not be the number that you wrote; write it as a text, or choose a smaller one" .path $number | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rayloom.imageProblems" -}}
{{- range $key := list "" "head" "inference" "trainer" "environment" }}
{{- $image := $.Values.image }}
{{- if $key }}{{- $image = index $.Values $key "image" | default dict }}{{- end }}
{{- $where := ternary "image" (printf "%s.image" $key) (eq $key "") }}
{{- $name := default "" $image.repository }}
{{- if or (contains "@" $name) (contains ":" (base $name)) }}
- {{ printf "%s.repository: got %s, expected a repository without a tag or a digest; put that into %s.tag or %s.digest" $where $name $where $where | quote }}
{{- else if and $name (not (regexMatch "^[a-z0-9._-]+(:[0-9]+)?(/[a-z0-9._-]+)*$" $name)) }}
- {{ printf "%s.repository: got %s, expected REGISTRY/NAME of small letters, digits and . _ -, without https://; correct it" $where $name | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Labels that the API server refuses. The operator would try to create such a pod again and again. */}}
{{- define "rayloom.labelProblems" -}}
{{- $maps := dict "commonLabels" .Values.commonLabels "labels" .Values.labels
      "kueue.queueName" (dict "kueue.x-k8s.io/queue-name" .Values.kueue.queueName)
      "kueue.priorityClass" (dict "kueue.x-k8s.io/priority-class" .Values.kueue.priorityClass) -}}
{{- range $kind := list "podMonitor" "rules" "dashboards" }}
{{- $_ := set $maps (printf "monitoring.%s.labels" $kind) (index $.Values.monitoring $kind).labels }}
{{- end }}
{{- range $claim := list "checkpoints" "database" "modelCache" }}
{{- $_ := set $maps (printf "%s.labels" $claim) (index $.Values $claim).labels }}
{{- end }}
{{- range $group := list "pods" "head" "inference" "trainer" "environment" }}
{{- range $key := list "labels" "nodeSelector" }}
{{- $_ := set $maps (printf "%s.%s" $group $key) (index $.Values $group $key | default dict) }}
{{- end }}
{{- end }}
{{- range $name, $_ := .Values.monitoring.podMonitor.seriesLabels }}
{{- if or (not (regexMatch "^[a-zA-Z][a-zA-Z0-9_]*$" $name)) (has $name (list "container" "endpoint" "instance" "job" "namespace" "pod" "ray_io_cluster" "release" "run")) }}
- {{ printf "monitoring.podMonitor.seriesLabels: got the label %s, expected letters, digits and _, and none of the labels that every series has; choose another name" $name | quote }}
{{- end }}
{{- end }}
{{- range $where, $labels := $maps }}
{{- range $name, $value := $labels }}
{{- if or (gt (len (toString $value)) 63) (not (regexMatch "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$" (toString $value))) }}
- {{ printf "%s: got the value %q of %s, expected at most 63 letters, digits, . _ and -, with a letter or a digit at both ends; shorten or correct it" $where $value $name | quote }}
{{- end }}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" $name) }}
- {{ printf "%s: got the name %q, expected PREFIX/NAME or NAME, with at most 63 letters, digits, . _ and - in NAME; correct it" $where $name | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Volumes that would hide directories of the image, of Kubernetes or of Ray. Every pod has the volume of
     checkpoints: two pods with a common session directory of Ray, or a common /dev/shm, would break each other. */}}
{{- define "rayloom.mountProblems" -}}
{{- $own := list -}}
{{- range $key := list "checkpoints" "modelCache" "workspace" }}
{{- $own = append $own (dict "where" (printf "%s.mountPath" $key) "path" (index $.Values $key).mountPath) }}
{{- end }}
{{- range $group := list "pods" "head" "inference" "trainer" "environment" }}
{{- $scratch := list }}
{{- range concat $.Values.pods.volumes (index $.Values $group "volumes" | default list) }}
{{- if or (hasKey . "emptyDir") (hasKey . "ephemeral") (hasKey . "hostPath") }}{{- $scratch = append $scratch .name }}{{- end }}
{{- end }}
{{- range index $.Values $group "volumeMounts" | default list }}
{{- $own = append $own (dict "where" (printf "%s.volumeMounts" $group) "path" .mountPath "isScratch" (has .name $scratch)) }}
{{- end }}
{{- end }}
{{- $needed := list "/tmp" "/tmp/ray" "/dev/shm" "/home/rayloom" "/opt/rayloom" "/database" "/secrets" "/bin" "/dev" "/etc" "/lib" "/lib64" "/proc" "/sbin" "/sys" "/usr" "/var" }}
{{- range $mount := $own }}
{{- $path := clean $mount.path }}
{{- range $place := $needed }}
{{- $isOver := or (eq $path $place) (hasPrefix (printf "%s/" (trimSuffix "/" $path)) $place) }}
{{- /* A scratch volume, which each pod has for itself, may be mounted for Ray's spilled objects. */}}
{{- $isIn := and (has $place (list "/tmp/ray" "/dev/shm" "/opt/rayloom" "/database" "/secrets" "/proc" "/sys")) (hasPrefix (printf "%s/" $place) $path) }}
{{- if and (or $isOver $isIn) (not (and $mount.isScratch (hasPrefix "/tmp/ray" $path))) (not (and (eq $path "/tmp") (eq $place "/tmp/ray"))) }}
- {{ printf "%s: got %s, which overlaps %s, a directory that the pod uses; expected an unused one, such as /data; choose another" $mount.where $path $place | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Groups whose pods do not have room for the parts of their role. A part is never divided between pods, so sums
     would be wrong: two pods of 3 GPUs each have room for two engines of 2 GPUs, not for three. */}}
{{- define "rayloom.placeProblems" -}}
{{- $config := include "rayloom.config" . | fromYaml -}}
{{- $parts := list
      (dict "group" "inference" "part" "engines" "count" $config.inference.num_replicas
            "cpus" $config.inference.cpus_per_replica "gpus" $config.inference.gpus_per_replica
            "keys" "inference.num_replicas, cpus_per_replica, gpus_per_replica")
      (dict "group" "trainer" "part" "ranks" "count" $config.trainer.num_ranks
            "cpus" 1 "gpus" $config.trainer.gpus_per_rank
            "keys" "trainer.num_ranks, gpus_per_rank")
      (dict "group" "environment" "part" "environment actors"
            "count" (eq (include "rayloom.testedBy" .) "session" | ternary 0 $config.rollouts.num_actors)
            "cpus" 1 "gpus" 0
            "keys" "rollouts.num_actors") -}}
{{- /* A development cluster may be larger or smaller than any run. */}}
{{- range $part := ternary $parts (list) (and (ne .Values.mode "cluster") (not (empty .Values.config))) }}
{{- $isShared := and (eq $part.part "ranks") (eq (include "rayloom.isColocated" $) "true") }}
{{- $name := ternary "inference" $part.group $isShared }}
{{- $group := index $.Values $name }}
{{- $room := include "rayloom.room" (dict "part" $part "cpus" $group.rayCpus "gpus" $group.gpus) | int }}
{{- $places := mul $room $group.replicas }}
{{- if $isShared }}
{{- /* The ranks have the room that the engines leave; engines fill one pod after the other. */}}
{{- $engines := first $parts }}
{{- $beside := include "rayloom.room" (dict "part" $engines "cpus" $group.rayCpus "gpus" $group.gpus) | int | max 1 }}
{{- $places = 0 }}
{{- range $pod := until (int $group.replicas) }}
{{- $here := min $beside (max 0 (sub (int $engines.count) (mul $pod $beside))) }}
{{- $cpus := subf $group.rayCpus (mulf $here $engines.cpus) }}
{{- $gpus := subf $group.gpus (mulf $here $engines.gpus) }}
{{- $places = add $places (include "rayloom.room" (dict "part" $part "cpus" $cpus "gpus" $gpus) | int) }}
{{- end }}
{{- end }}
{{- if gt (int $part.count) (int $places) }}
- {{ printf "%s: %d pods of %v CPUs and %v GPUs have room for %d %s of %v CPUs and %v GPUs%s, config asks for %d; raise replicas, rayCpus or gpus of the group, or lower config.%s" $name (int $group.replicas) $group.rayCpus $group.gpus (int $places) $part.part $part.cpus $part.gpus (ternary " beside the engines (trainer.replicas is 0)" "" $isShared) (int $part.count) $part.keys | quote }}
{{- else if and $group.gpus (eq (float64 $part.gpus) 0.0) (not $isShared) }}
- {{ printf "%s.gpus: got %v GPUs for each pod, but config gives %s none; set gpus to 0, or request GPUs by config.%s" $part.group $group.gpus $part.part $part.keys | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The number of copies of a part for which a pod has room. Takes: part, cpus and gpus (of the pod). */}}
{{- define "rayloom.room" -}}
{{- $room := 10000 }}
{{- range list (list .part.cpus .cpus) (list .part.gpus .gpus) }}
{{- $asked := float64 (index . 0) }}
{{- if gt $asked 0.0 }}
{{- /* Ray counts in units of 1e-4. */}}
{{- $room = min $room (max 0 (int (floor (addf (divf (index . 1) $asked) 1e-6)))) }}
{{- end }}
{{- end }}
{{- $room -}}
{{- end -}}

{{- define "rayloom.configProblems" -}}
{{- $config := include "rayloom.config" . | fromYaml -}}
{{- if and (eq .Values.mode "cluster") (not .Values.config) }}
{{- /* The chart starts no run, so it needs no configuration. */}}
{{- else if not .Values.config }}
- "config: got none, expected Rayloom's configuration; begin with one of the chart's own, by --values helm/values-cpu-dev.yaml, values-gpu-small.yaml or values-production.yaml"
{{- else if not (and .Values.config.model (or .Values.config.tasks .Values.config.mixture)) }}
- "config: has no model, or neither tasks nor a mixture, expected a model and one of the two; take a whole configuration, such as of the chart's values-cpu-dev.yaml"
{{- end }}
{{- $model := dig "model" dict .Values.config }}
{{- $given := list }}
{{- range $key := list "path" "tiny" }}
{{- if and (hasKey $model $key) (not (kindIs "invalid" (index $model $key))) }}{{- $given = append $given $key }}{{- end }}
{{- end }}
{{- if gt (len $given) 1 }}
- {{ printf "config.model: got path %s and tiny, expected one of them; values files below may set the other one: remove it with null, such as {tiny: null}" $model.path | quote }}
{{- else if and $model (not $given) }}
- "config.model: got neither path nor tiny, expected one of them; name a model as path, or {tiny: {}} for the built-in one"
{{- end }}
{{- range $key, $path := dict "model.path" (default "" $model.path) "algorithm.reference" (dig "algorithm" "reference" "" .Values.config | default "") "algorithm.critic.model" (dig "algorithm" "critic" "model" "" .Values.config | default "") }}
{{- if contains "://" $path }}
- {{ printf "config.%s: got %s, expected the name of a model on a hub, or a directory in the pods; models are not loaded from URLs: copy it to a volume, mount that by pods.volumes and pods.volumeMounts, and name the directory" $key $path | quote }}
{{- end }}
{{- end }}
{{- if and (eq .Values.mode "job") (eq (dig "environment" "" (default dict (get (default dict .Values.config) "tasks")) | default "") "session") }}
- "config.tasks.environment: got session with mode job, which has no API for the agents; expected mode service; set it, or choose another environment"
{{- end }}
{{- if eq (int $config.service.port) (int $config.metrics.port) }}
- {{ printf "config.metrics.port: got %d, which is also config.service.port; expected different ports: choose another" (int $config.metrics.port) | quote }}
{{- end }}
{{- $taken := list 6379 8080 8265 10001 44217 44227 52365 -}}
{{- range $section := list "service" "metrics" }}
{{- $host := index $config $section "host" -}}
{{- $port := int (index $config $section "port") -}}
{{- if or (eq $host "localhost") (hasPrefix "127." $host) (eq $host "::1") }}
- {{ printf "config.%s.host: got %s, expected 0.0.0.0; a Service reaches a pod at the pod's own address, not at loopback" $section $host | quote }}
{{- end }}
{{- if or (has $port $taken) (and (ge $port 10002) (le $port 19999)) (lt $port 1024) }}
- {{ printf "config.%s.port: got %d, expected 1024 or more, and not a port of Ray (10002 to 19999, %s); choose another" $section $port (join ", " $taken) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "rayloom.accessProblems" -}}
{{- range $key := list "ingress" "httpRoute" }}
{{- if and (eq $.Values.mode "job") (index $.Values $key).enabled }}
- {{ printf "%s.enabled: got true with mode job, which has no API; set it to false" $key | quote }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.tlsSecret (not .Values.ingress.host) (not .Values.ingress.hosts) }}
- "ingress.host: got none with ingress.tlsSecret; expected the name that the certificate is for"
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
- "httpRoute.parentRefs: got none with httpRoute.enabled; expected the Gateway, such as [{name: public, namespace: gateways}]"
{{- end }}
{{- with .Values.workspace }}
{{- if gt (len (compact (list (empty .files | ternary "" "x") .existingConfigMap .existingClaim))) 1 }}
- "workspace: got several of files, existingConfigMap and existingClaim, expected one; remove the others"
{{- end }}
{{- $reserved := $.Files.Get "files/module-names.txt" | replace "\n" " " | splitList " " }}
{{- range $file, $_ := .files }}
{{- if and (hasSuffix ".py" $file) (has (trimSuffix ".py" $file) $reserved) }}
- {{ printf "workspace.files: got %s, which hides the module %s of Python, of Rayloom or of a library, because the directory is on Python's path; expected another name: rename it" $file (trimSuffix ".py" $file) | quote }}
{{- end }}
{{- end }}
{{- if gt (len (toJson .files)) 1000000 }}
- "workspace.files: got more than a ConfigMap holds, 1 MiB; put them on a volume and name it as existingClaim"
{{- end }}
{{- end }}
{{- $environments := include "rayloom.serviceAccountName" (dict "context" . "name" "environment") }}
{{- if and .Values.serviceAccount.create (eq .Values.serviceAccount.name $environments) }}
- {{ printf "serviceAccount.name: got %s, the account of environment pods, which must not have rights; choose another" $environments | quote }}
{{- end }}
{{- with .Values.serviceAccount }}
{{- if and .create (eq .name "default") }}
- "serviceAccount.name: got default with create true, but Kubernetes creates this account itself; set create to false, or choose another name"
{{- end }}
{{- if and .annotations (not .create) }}
- "serviceAccount.annotations: got annotations with create false, which adds them to no account; expected none: annotate the account yourself and remove them, or set create to true"
{{- end }}
{{- end }}
{{- if and .Values.auth.ray.existingSecret (eq .Values.auth.ray.mode "disabled") }}
- {{ printf "auth.ray.existingSecret: got %s with auth.ray.mode disabled, which uses no token; expected mode token: set it, or remove the Secret's name" .Values.auth.ray.existingSecret | quote }}
{{- end }}
{{- if and .Values.gcs.redis.address (ne .Values.gcs.backend "redis") }}
- {{ printf "gcs.redis.address: got %s with gcs.backend %s, which does not use it; expected backend redis: set it, or set the address to \"\"" .Values.gcs.redis.address .Values.gcs.backend | quote }}
{{- end }}
{{- range $key, $name := dict "queueName" "kueue.x-k8s.io/queue-name" "priorityClass" "kueue.x-k8s.io/priority-class" }}
{{- $given := get $.Values.labels $name }}
{{- $own := index $.Values.kueue $key }}
{{- if and $given $own (ne $given $own) }}
- {{ printf "labels: got %s of %s, but kueue.%s is %s; expected one of them: remove the label, or kueue.%s" $given $name $key $own $key | quote }}
{{- end }}
{{- end }}
{{- if and (eq .Values.gcs.backend "redis") (not .Values.gcs.redis.address) }}
- "gcs.redis.address: got none with gcs.backend redis; expected one such as redis:6379"
{{- end }}
{{- $port := regexFind "[0-9]+$" .Values.gcs.redis.address }}
{{- if and $port (or (gt (int $port) 65535) (eq (int $port) 0)) }}
- {{ printf "gcs.redis.address: got port %s, expected 1 to 65535, such as redis:6379; correct it" $port | quote }}
{{- end }}
{{- if and (eq .Values.auth.ray.mode "token") (semverCompare "<2.52.0-0" .Values.rayVersion) }}
- {{ printf "rayVersion: got %s, expected 2.52.0 or newer with auth.ray.mode token; set mode to disabled or use a newer image" .Values.rayVersion | quote }}
{{- end }}
{{- $checkpoints := .Values.checkpoints }}
{{- if and .Values.service.loadBalancerSourceRanges (ne .Values.service.type "LoadBalancer") }}
- {{ printf "service.loadBalancerSourceRanges: got ranges with type %s, expected LoadBalancer: Kubernetes refuses ranges for other types; set the type, or use networkPolicy" .Values.service.type | quote }}
{{- end }}
{{- $database := .Values.database }}
{{- if and $database.existingSecret $database.existingClaim }}
- "database: got existingSecret and existingClaim, expected one of them: a run has its database in PostgreSQL, or on a volume"
{{- end }}
{{- if and $database.existingClaim (eq $database.existingClaim $checkpoints.existingClaim) }}
- {{ printf "database.existingClaim: got %s, which is also checkpoints.existingClaim; expected another volume: every pod mounts that one" $database.existingClaim | quote }}
{{- end }}
{{- if and $database.existingClaim .Values.modelCache.enabled (eq $database.existingClaim .Values.modelCache.existingClaim) }}
- {{ printf "database.existingClaim: got %s, which is also modelCache.existingClaim; expected another volume: every pod mounts that one" $database.existingClaim | quote }}
{{- end }}
{{- /* A storage class with ReadWriteMany is a network file system, on which SQLite breaks (docs/storage.md). */}}
{{- if and (has "ReadWriteMany" $checkpoints.accessModes) (not $checkpoints.existingClaim) (not $database.existingSecret) (not $database.existingClaim) (eq $database.storageClass $checkpoints.storageClass) }}
- {{ printf "database.storageClass: got %s, the class of checkpoints, which must support ReadWriteMany; expected block storage: SQLite breaks on a network file system; name another class, or set a PostgreSQL by database.existingSecret" (default "the cluster's default" $database.storageClass) | quote }}
{{- end }}
{{- $outside := list }}
{{- if .Values.database.existingSecret }}{{- $outside = append $outside "the database" }}{{- end }}
{{- if eq .Values.gcs.backend "redis" }}{{- $outside = append $outside "Redis" }}{{- end }}
{{- if include "rayloom.hubContents" . | fromJsonArray }}{{- $outside = append $outside "the model hub" }}{{- end }}
{{- if and .Values.networkPolicy.enabled $outside (not .Values.networkPolicy.egress) }}
- {{ printf "networkPolicy.egress: got none with networkPolicy.enabled; the pods could not reach %s; add rules that allow it" (join ", " $outside) | quote }}
{{- end }}
{{- $named := list }}
{{- range include "rayloom.hubContents" . | fromJsonArray }}{{- $named = append $named .name }}{{- end }}
{{- range $name, $_ := .Values.modelCache.revisions }}
{{- if not (has $name $named) }}
- {{ printf "modelCache.revisions: got %s, expected hub names that config uses (%s); correct the name, or remove it" $name (join ", " (uniq $named) | default "none") | quote }}
{{- end }}
{{- end }}
{{- if and .Values.modelCache.revisions (not .Values.modelCache.enabled) }}
- "modelCache.revisions: got revisions without modelCache.enabled, without which the chart does not download models; set it to true, or remove them"
{{- end }}
{{- $model := dig "model" "path" "" .Values.config | default "" }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.environmentEgress) (not .Values.modelCache.enabled) (has $model (include "rayloom.hubModels" . | fromJsonArray)) }}
- {{ printf "networkPolicy.environmentEgress: got none with networkPolicy.enabled; environment pods load the tokenizer of %s from the model hub; add rules that allow it, or set modelCache.enabled, with which only the head uses the hub" $model | quote }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.operatorNamespace) }}
- "networkPolicy.operatorNamespace: got none with networkPolicy.enabled; without it the operator could not reach the head: name the namespace that it runs in"
{{- end }}
{{- end -}}

{{/* A duration in Prometheus' form, such as 1m30s, as milliseconds. */}}
{{- define "rayloom.milliseconds" -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 -}}
{{- $number := regexFind "^[0-9]+" . -}}
{{- $sum = add $sum (mul ($number | int) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) (trimPrefix $number .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{- define "rayloom.alertProblems" -}}
{{- with .Values.monitoring.podMonitor }}
{{- /* The Prometheus operator ignores a monitor that it cannot read, and only logs this. */}}
{{- if and .enabled .scrapeTimeout (gt (include "rayloom.milliseconds" .scrapeTimeout | int) (include "rayloom.milliseconds" .interval | int)) }}
- {{ printf "monitoring.podMonitor.scrapeTimeout: got %s, expected at most the interval, %s; lower it, or raise the interval" .scrapeTimeout .interval | quote }}
{{- end }}
{{- /* A regular expression with an empty alternative matches the empty text, unless it has an error. */}}
{{- if not (regexMatch (printf "|%s" .dropSeries) "") }}
- {{ printf "monitoring.podMonitor.dropSeries: got %s, which is not a regular expression, expected one such as ray_grpc_server_.*; correct it, for example a parenthesis that is not closed" .dropSeries | quote }}
{{- end }}
{{- end }}
{{- $chosen := .Values.monitoring.rules -}}
{{- $alerts := list -}}
{{- range $path, $_ := .Files.Glob "files/rules/*.yaml" }}
{{- range ($.Files.Get $path | fromYaml).groups }}
{{- range .rules }}{{- if .alert }}{{- $alerts = append $alerts .alert }}{{- end }}{{- end }}
{{- end }}
{{- end }}
{{- range $key, $names := dict "disabled" $chosen.disabled "labelsOf" (keys $chosen.labelsOf | sortAlpha) }}
{{- range $name := $names }}
{{- if not (has $name $alerts) }}
- {{ printf "monitoring.rules.%s: got %s, which is not an alert, expected one of %s; correct it, or remove it" $key $name (join ", " (sortAlpha $alerts)) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Changes that are refused while the cluster runs. `helm template` sees no cluster, and refuses nothing here. */}}
{{- define "rayloom.runningProblems" -}}
{{- $kinds := dict "service" "RayService" "job" "RayJob" "cluster" "RayCluster" -}}
{{- $name := include "rayloom.fullname" . -}}
{{- $own := get $kinds .Values.mode -}}
{{- $digests := include "rayloom.digests" . | fromYaml -}}
{{- range $kind := values $kinds | sortAlpha }}
{{- range (lookup "ray.io/v1" $kind $.Release.Namespace "").items }}
{{- $labels := default dict .metadata.labels }}
{{- $isOurs := and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq (get $labels "app.kubernetes.io/part-of") "rayloom") }}
{{- /* An object with an owner is the operator's own, such as the cluster of a RayService. */}}
{{- if and $isOurs (not .metadata.ownerReferences) (not .spec.suspend) }}
{{- $before := default dict .metadata.annotations }}
{{- if or (ne $kind $own) (ne .metadata.name $name) }}
- {{ printf "mode, nameOverride, fullnameOverride: %s %s of this release is running, and would be replaced by %s %s before its pods have ended, so that two clusters would have the run; suspend it first" $kind .metadata.name $own $name | quote }}
{{- else if and (eq $own "RayService") (not $.Values.suspend) (ne (get $before "rayloom/cluster") (index $digests "rayloom/cluster")) (ne (get $before "rayloom/serve") (index $digests "rayloom/serve")) }}
- {{ printf "RayService %s is running, and both its configuration and its pods change; the new configuration would take effect at once, on the old pods: suspend it first, or change one after the other" $name | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
