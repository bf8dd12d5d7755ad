{{/* What the chart alone can know: its values against each other, and the configuration against the
     pods. What is wrong with the configuration by itself, Rayloom says (`rayloom check`). Every
     sentence names its key: what was got, what was expected, what to do. All are told at once. */}}
{{- define "rayloom.validate" -}}
{{- $problems := concat
      (include "rayloom.nameProblems" . | fromYamlArray)
      (include "rayloom.groupProblems" . | fromYamlArray)
      (include "rayloom.capacityProblems" . | fromYamlArray)
      (include "rayloom.configProblems" . | fromYamlArray)
      (include "rayloom.accessProblems" . | fromYamlArray) -}}
{{- if $problems -}}
{{- fail (printf "these values are refused:\n  - %s" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "rayloom.nameProblems" -}}
{{- $name := include "rayloom.fullname" . -}}
{{- if gt (len $name) 47 }}
- {{ printf "fullnameOverride: the name %s has %d characters, expected at most 47, as the operator lengthens it; choose a shorter release name or set fullnameOverride" $name (len $name) | quote }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
- {{ printf "fullnameOverride: got the name %s, expected small letters, digits and hyphens, beginning with a letter; choose another release name or set fullnameOverride" $name | quote }}
{{- end }}
{{- end -}}

{{- define "rayloom.groupProblems" -}}
{{- $reserved := list "RAYLOOM_API_KEY" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "RAY_enable_autoscaler_v2" -}}
{{- range $name := list "head" "inference" "trainer" "environment" }}
{{- $group := index $.Values $name }}
{{- range $group.env }}
{{- if has .name $reserved }}
- {{ printf "%s.env: %s is set by the chart or the operator; take it out (auth, drain.timeoutSeconds)" $name .name | quote }}
{{- end }}
{{- end }}
{{- if ne $name "head" }}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) }}
- {{ printf "%s.minReplicas: got %d, expected at most maxReplicas (%d); lower the first or raise the second" $name (int $group.minReplicas) (int $group.maxReplicas) | quote }}
{{- else if or (lt (int $group.replicas) (int $group.minReplicas)) (gt (int $group.replicas) (int $group.maxReplicas)) }}
- {{ printf "%s.replicas: got %d, expected %d to %d (minReplicas to maxReplicas); change one of the three" $name (int $group.replicas) (int $group.minReplicas) (int $group.maxReplicas) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pods together offer what the configuration asks of Ray, which places by CPUs and GPUs alone. */}}
{{- define "rayloom.capacityProblems" -}}
{{- $config := .Values.config -}}
{{- $cpus := 0 -}}
{{- $gpus := 0 -}}
{{- $mostGpus := 0 -}}
{{- range list "inference" "trainer" "environment" -}}
{{- $group := index $.Values . -}}
{{- $cpus = addf $cpus (mulf $group.replicas $group.rayCpus) -}}
{{- $gpus = addf $gpus (mulf $group.replicas $group.gpus) -}}
{{- if gt (int $group.replicas) 0 -}}
{{- $mostGpus = max $mostGpus $group.gpus -}}
{{- end -}}
{{- end -}}
{{- $engines := mulf $config.inference.num_replicas $config.inference.cpus_per_replica -}}
{{- $wantedCpus := addf $engines $config.trainer.num_ranks $config.rollouts.num_actors -}}
{{- if gt $wantedCpus $cpus }}
- {{ printf "rayCpus: the groups offer %v CPUs, config asks for %v (inference.num_replicas x cpus_per_replica + trainer.num_ranks + rollouts.num_actors); raise rayCpus or replicas of a group, or lower what config asks for" $cpus $wantedCpus | quote }}
{{- end }}
{{- $engineGpus := mulf $config.inference.num_replicas $config.inference.gpus_per_replica -}}
{{- $wantedGpus := addf $engineGpus (mulf $config.trainer.num_ranks $config.trainer.gpus_per_rank) -}}
{{- if gt $wantedGpus $gpus }}
- {{ printf "gpus: the groups offer %v GPUs, config asks for %v (inference.num_replicas x gpus_per_replica + trainer.num_ranks x gpus_per_rank); raise gpus or replicas of a group, or lower what config asks for" $gpus $wantedGpus | quote }}
{{- else if and (eq $wantedGpus 0.0) (gt $gpus 0.0) }}
- {{ printf "gpus: the groups reserve %v GPUs, and config uses none; set config.inference.gpus_per_replica or config.trainer.device and gpus_per_rank, or gpus to 0" $gpus | quote }}
{{- else if gt (float64 $config.inference.gpus_per_replica) (float64 $mostGpus) }}
- {{ printf "config.inference.gpus_per_replica: got %v, expected at most the %v GPUs of one pod; an engine does not span pods: raise gpus of a group" $config.inference.gpus_per_replica $mostGpus | quote }}
{{- end }}
{{- end -}}

{{- define "rayloom.configProblems" -}}
{{- $config := .Values.config -}}
{{- if and (kindIs "map" $config.model.tiny) $config.model.path }}
- "config.model: both tiny and path are set, expected one; the chart's own values have tiny: take it back with tiny: null"
{{- end }}
{{- $taken := list 6379 8080 8265 10001 44217 44227 52365 -}}
{{- range $section := list "service" "metrics" }}
{{- $host := index $config $section "host" -}}
{{- $port := int (index $config $section "port") -}}
{{- if or (eq $host "localhost") (hasPrefix "127." $host) (eq $host "::1") }}
- {{ printf "config.%s.host: got %s, expected 0.0.0.0; a Service reaches a pod at its own address, never at loopback" $section $host | quote }}
{{- end }}
{{- if or (has $port $taken) (and (ge $port 10002) (le $port 19999)) (lt $port 1024) }}
- {{ printf "config.%s.port: got %d, expected 1024 or more and none of Ray's own (10002 to 19999, %s); choose another" $section $port (join ", " $taken) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "rayloom.accessProblems" -}}
{{- if and (not .Values.auth.api.create) (not .Values.auth.api.existingSecret) }}
- "auth.api.existingSecret: got none with auth.api.create false; the API listens beyond loopback and does not start without a key: name a Secret, or let one be created"
{{- end }}
{{- if eq .Values.auth.ray.mode "token" }}
{{- if and (not .Values.auth.ray.create) (not .Values.auth.ray.existingSecret) }}
- "auth.ray.existingSecret: got none with auth.ray.create false and mode token; name a Secret with the key auth_token, let one be created, or set mode to disabled"
{{- end }}
{{- if semverCompare "<2.52.0-0" .Values.rayVersion }}
- {{ printf "rayVersion: got %s, expected 2.52.0 or newer with auth.ray.mode token; set mode to disabled or use a newer image" .Values.rayVersion | quote }}
{{- end }}
{{- end }}
{{- if and (not .Values.checkpoints.create) (not .Values.checkpoints.existingClaim) }}
- "checkpoints.existingClaim: got none with checkpoints.create false; name a claim, or let one be created"
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.operatorNamespace) }}
- "networkPolicy.operatorNamespace: got none with networkPolicy.enabled; without it the operator could not reach the head: name the namespace that it runs in"
{{- end }}
{{- end -}}
