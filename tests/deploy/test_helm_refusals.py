"""Tests of what the chart refuses: typos by its schema, contradictory values by a message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from ray._private import ray_constants
from worlds.servers.helm_chart import (
    CHART,
    GROUPS,
    VARIANTS,
    HelmError,
    helm,
    in_proof,
    lint,
    nested,
    rendered,
)

# Values as a user writes them, and the words of the refusal.
Case = tuple[str, ...]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MISSPELT: list[Case] = [
    ("trainr: {}", "trainr", "not allowed"),
    ("trainer: {gpu: 1}", "trainer", "gpu", "not allowed"),
    ("trainer: {replicas: -1}", "trainer.replicas"),
    ("trainer: {env: [{name: A}]}", "trainer.env.0", "value"),
    ("head: {replicas: 2}", "head", "replicas", "not allowed"),
    ("head: {resources: {limits: {memory: 4 GB}}}", "head.resources.limits.memory"),
    # The error names the key, because it does not match the pattern of a resource's name.
    ("inference: {resources: {limits: {memroy: 1Gi}}}", "memroy"),
    ("inference: {gpuResource: gpu}", "inference.gpuResource"),
    ("trainer: {affinity: {nodeAffinty: {}}}", "trainer.affinity", "nodeAffinty", "not allowed"),
    ("trainer: {env: [{name: A, valueFrom: {secretKeyref: {}}}]}",
     "trainer.env.0.valueFrom", "secretKeyref", "not allowed"),
    ("trainer: {env: [{name: A, valueFrom: {secretKeyRef: {name: a}}}]}",
     "trainer.env.0.valueFrom.secretKeyRef", "key"),
    ("networkPolicy: {apiFrom: [{podSelector: {matchLabls: {}}}]}",
     "networkPolicy.apiFrom.0.podSelector", "matchLabls", "not allowed"),
    ("config: {trainer: {num_rankz: 2}}", "config.trainer", "num_rankz", "not allowed"),
    ("config: {run: {steps: 0}}", "config.run.steps"),
    ("config: {trainer: null}", "config.trainer", "object"),
    ("mode: Service", "mode", "cluster"),
    ("gcs: {backend: etcd}", "gcs.backend", "rocksdb"),
    ("auth: {api: {token: abc}}", "auth.api", "token", "not allowed"),
    ("pods: {volumes: [{name: a, emptydir: {}}]}", "pods.volumes.0", "emptydir", "not allowed"),
    ("pods: {labels: {ray.io/cluster: x}}", "ray.io.cluster"),
    ("pods: {rayStartParams: {num-cpus: '4'}}", "num-cpus"),
    ("labels: {app.kubernetes.io/name: x}", "app.kubernetes.io.name"),
    ("pods: {podSecurityContext: {runAsUser: -1}}", "podSecurityContext.runAsUser"),
    ("pods: {capabilities: {add: [CAP_IPC_LOCK]}}", "capabilities.add.0"),
    ("head: {readinessProbe: {periodSecond: 30}}", "periodSecond", "not allowed"),
    ("enviroment: {replicas: 1}", "enviroment", "not allowed"),
    ("head: {sidecars: [{image: x}]}", "head.sidecars.0", "name"),
    ("rayVersion: 2.6", "rayVersion", "string"),
    ("image: {digest: 'sha256:12'}", "image.digest"),
    ("checkpoints: {mountPath: data}", "checkpoints.mountPath"),
    ("monitoring: {rules: {runbooks: docs/runbooks.md}}", "monitoring.rules.runbooks"),
    # The URL is written into JSON.
    ("monitoring: {rules: {runbooks: 'https://x/\"'}}", "monitoring.rules.runbooks"),
    ("gcs: {backend: redis, redis: {address: redis}}", "gcs.redis.address"),
]  # fmt: skip
CONTRADICTIONS: list[Case] = [
    ("fullnameOverride: " + "a" * 48, "fullnameOverride", "48 characters", "at most 47"),
    ("fullnameOverride: 9lives", "fullnameOverride", "9lives", "with a letter"),
    ("config: {trainer: {num_ranks: 9}}",
     "trainer: 1 pods of 2 CPUs", "room for 2 ranks", "config asks for 9"),
    # All groups together have enough CPUs, but one group does not.
    ("{config: {rollouts: {num_actors: 2}}, trainer: {rayCpus: 8}}",
     "environment: 1 pods of 1 CPUs", "room for 1 environment actors", "asks for 2"),
    ("config: {inference: {num_replicas: 2}}",
     "inference: 1 pods of 1 CPUs and 0 GPUs have room for 1"),
    ("config: {inference: {cpus_per_replica: 2}}",
     "inference: 1 pods of 1 CPUs and 0 GPUs have room for 0"),
    ("config: {inference: {gpus_per_replica: 1}}",
     "inference: 1 pods of 1 CPUs and 0 GPUs have room for 0"),
    ("config: {trainer: {num_ranks: 3}}",
     "trainer: 1 pods of 2 CPUs and 0 GPUs have room for 2"),
    ("config: {trainer: {gpus_per_rank: 1}}",
     "trainer: 1 pods of 2 CPUs and 0 GPUs have room for 0"),
    ("config: {rollouts: {num_actors: 2}}",
     "environment: 1 pods of 1 CPUs and 0 GPUs have room for 1"),
    ("trainer: {gpus: 1}", "trainer.gpus: got 1 GPUs for each pod", "ranks none"),
    ("config: {trainer: {device: cuda, gpus_per_rank: 1}}",
     "trainer: 1 pods of 2 CPUs and 0 GPUs have room for 0 ranks", "asks for 2"),
    # Six GPUs would be enough for three engines of two, but each pod has three.
    ("{config: {inference: {num_replicas: 3, gpus_per_replica: 2, tensor_parallel_size: 2}}, "
     "inference: {gpus: 3, replicas: 2, rayCpus: 4}}",
     "inference: 2 pods of 4 CPUs and 3 GPUs have room for 2 engines of 1 CPUs and 2 GPUs"),
    ("trainer: {resources: {requests: {memory: 6Gi}}}",
     "trainer.resources.requests.memory: got 6Gi", "the limit, 5Gi"),
    ("head: {resources: {requests: {cpu: 1500m}, limits: {cpu: 1}}}",
     "head.resources.requests.cpu: got 1500m", "the limit, 1;"),
    ("trainer: {resources: {requests: {rdma/hca: 1}}}",
     "trainer.resources: got a request of 1 and a limit of none for rdma/hca"),
    ("enabled: false", "enabled: got false", "umbrella chart"),
    ("head: {tolerations: [{key: a, operator: Exists, value: x}]}",
     "head.tolerations: got the value x", "expected none"),
    ("head: {tolerations: [{value: x}]}", "head.tolerations: got operator Equal without a key"),
    ("head: {tolerations: [{key: a, operator: Exists, tolerationSeconds: 3}]}",
     "head.tolerations: got tolerationSeconds with the effect none", "NoExecute"),
    *(
        (f"pods: {{topologySpreadConstraints: [{{maxSkew: {skew}, topologyKey: zone, "
         f"whenUnsatisfiable: {kind}}}]}}",
         "trainer.topologySpreadConstraints: got", *words)
        for skew, kind, words in (
            (0, "DoNotSchedule", ("maxSkew 0", "at least 1")),
            (1, "Schedule", ("Schedule", "or ScheduleAnyway")),
        )
    ),
    *(
        (f"head: {{hostAliases: [{{ip: {ip}, hostnames: [db]}}]}}",
         f"head.hostAliases: got the ip {ip}", "such as 10.0.0.1")
        for ip in ("db.example", "10.0.0", "10.0.0.256")
    ),
    ("pods: {volumes: [{name: a, emptyDir: {}}], volumeMounts: [{name: a, mountPath: data}]}",
     "head.volumeMounts: a is mounted at data", "absolute path, such as /data"),
    ("pods: {tmpSize: '20'}",
     "head.tmpSize: got 20, which is 20 bytes", "at least 64Mi", "such as 20Gi"),
    ("{mode: job, config: {tasks: {environment: session, options: {}}}}",
     "config.tasks.environment: got session with mode job", "mode service"),
    ("monitoring: {podMonitor: {enabled: true, scrapeTimeout: 1m30s}}",
     "podMonitor.scrapeTimeout: got 1m30s, expected at most the interval, 15s"),
    *(
        (json.dumps(nested(f"{where}.{name}", value)),
         f'{where}: got the value "{value}" of {name}', "correct it")
        for value in ("a b", "x" * 64, "-a", "a/b")
        for where, name in (
            ("pods.labels", "team"), ("trainer.labels", "team"), ("commonLabels", "team"),
            ("labels", "team"), ("head.nodeSelector", "zone"),
            ("monitoring.rules.labels", "team"),
        )
    ),
    ("kueue: {queueName: " + "q" * 64 + "}", "kueue.queueName: got the value"),
    ("pods: {labels: {a b: c}}", 'pods.labels: got the name "a b"'),
    ("pods: {labels: {" + "x" * 64 + ": c}}", "pods.labels: got the name"),
    *(
        (f"{group}: {{shmSize: {size}}}", f"{group}.shmSize: got {size}", "at least 94Mi")
        for group in GROUPS
        for size in ("10Mi", "93Mi", 1000)
    ),
    ("image: {repository: 'registry.example/rayloom:1', tag: '2'}",
     "image.repository: got registry.example/rayloom:1", "put that into image.tag"),
    ("environment: {image: {repository: 'envs@sha256:12'}}",
     "environment.image.repository: got envs@sha256:12, expected a repository without"),
    ("image: {repository: Registry/Rayloom}",
     "image.repository: got Registry/Rayloom", "small letters"),
    *(
        (f"{key}: {{mountPath: {path}}}", f"{key}.mountPath: got {path}, which overlaps")
        for key in ("checkpoints", "workspace", "modelCache")
        for path in (
            "/tmp", "/tmp/ray", "/tmp/ray/session_latest", "/dev", "/dev/shm", "/home",
            "/home/rayloom", "/opt", "/opt/rayloom", "/opt/rayloom/lib", "/usr", "/etc",
            "/database",
        )
    ),
    ("pods: {volumes: [{name: v, persistentVolumeClaim: {claimName: v}}], "
     "volumeMounts: [{name: v, mountPath: /tmp/ray}]}",
     "pods.volumeMounts: got /tmp/ray, which overlaps /tmp/ray"),
    *(
        (f"config: {{tasks: {{options: {{a: [{{high: {number}}}]}}}}}}",
         f"config.tasks.options.a.0.high: got {number}, expected a number between")
        for number in (2**53, -(2**53), 2**60)
    ),
    ("test: {task: {seed: 9007199254740992}}",
     "test.task.seed: got 9007199254740992, expected a number between"),
    ("config: {model: {path: Qwen/Qwen3-0.6B}}",
     "config.model: got path Qwen/Qwen3-0.6B and tiny, expected one of them"),
    ("config: {model: {tiny: null}}", "config.model: got neither path nor tiny"),
    ("trainer: {resources: {limits: {nvidia.com/gpu: 1}}}",
     "trainer.resources: got nvidia.com/gpu", "set trainer.gpus"),
    ("trainer: {env: [{name: A, value: '1'}, {name: A, value: '2'}]}",
     "trainer.env: A is set twice"),
    ("environment: {env: [{name: RAYLOOM_API_KEY, value: x}]}",
     "environment.env: RAYLOOM_API_KEY must not be a variable", "auth.api.existingSecret"),
    ("service: {loadBalancerSourceRanges: [10.0.0.0/8]}",
     "service.loadBalancerSourceRanges: got ranges with type ClusterIP"),
    ("environment: {env: [{name: HOME, value: /x}]}",
     "environment.env: HOME is set twice, or is also set by the chart"),
    ("{pods: {env: [{name: A, value: '1'}]}, head: {env: [{name: A, value: '1'}]}}",
     "head.env: A is set twice"),
    ("pods: {volumeMounts: [{name: data, mountPath: /data}]}",
     "trainer.volumeMounts: data is mounted at /data, but the volume does not exist"),
    ("trainer: {volumeMounts: [{name: tmp, mountPath: /checkpoints}]}",
     "trainer.volumeMounts: /checkpoints is set twice"),
    ("trainer: {volumeMounts: [{name: checkpoints, mountPath: /tmp/}]}",
     "trainer.volumeMounts: /tmp is set twice"),
    ("trainer: {volumes: [{name: shm, emptyDir: {}}]}", "trainer.volumes: shm is set twice"),
    ("trainer: {sidecars: [{name: ray-worker, image: x}]}",
     "trainer.initContainers or sidecars: ray-worker is set twice"),
    ("trainer: {sidecars: [{name: logs, image: x, resources: {requests: {cpu: 2}, "
     "limits: {cpu: 500m}}}]}",
     "trainer.sidecars.logs.resources.requests.cpu: got 2", "the limit, 500m"),
    ("trainer: {shmSize: 5Gi}", "trainer.shmSize: got 5Gi", "memory limit, 5Gi"),
    ("{mode: job, ingress: {enabled: true}}", "ingress.enabled: got true", "no API"),
    ("ingress: {tlsSecret: a}", "ingress.host: got none with ingress.tlsSecret"),
    ("httpRoute: {enabled: true}", "httpRoute.parentRefs: got none"),
    ("workspace: {files: {a: b}, existingClaim: c}",
     "workspace: got several of files, existingConfigMap and existingClaim"),
    ("workspace: {files: {a: " + "b" * 1100000 + "}}", "workspace.files: got more"),
    ("checkpoints: {accessModes: [ReadWriteMany]}",
     "database.storageClass: got the cluster's default", "database.existingSecret"),
    ("{checkpoints: {accessModes: [ReadWriteMany], storageClass: nfs}, "
     "database: {storageClass: nfs}}",
     "database.storageClass: got nfs, the class of checkpoints"),
    ("database: {existingSecret: a, existingClaim: b}",
     "database: got existingSecret and existingClaim, expected one of them"),
    ("{database: {existingClaim: a}, checkpoints: {existingClaim: a}}",
     "database.existingClaim: got a, which is also checkpoints.existingClaim"),
    ("config: {service: {host: 127.0.0.1}}",
     "config.service.host: got 127.0.0.1, expected 0.0.0.0"),
    ("config: {metrics: {host: localhost}}",
     "config.metrics.host: got localhost, expected 0.0.0.0"),
    ("config: {service: {port: 8265}}",
     "config.service.port: got 8265, expected 1024 or more", "a port of Ray"),
    ("config: {metrics: {port: 0}}", "config.metrics.port: got 0, expected 1024 or more"),
    ("config: {metrics: {port: 8000}}",
     "config.metrics.port: got 8000, which is also config.service.port"),
    ("serviceAccount: {name: demo-rayloom-environment}",
     "serviceAccount.name: got demo-rayloom-environment, the account of environment pods"),
    ("gcs: {backend: redis}", "gcs.redis.address: got none", "redis:6379"),
    ("tags: {a: true}", "tags: helm reads this key only at the top of an umbrella chart's"),
    *(
        (f"{group}: {{{key}: {value}}}", f"{group}.{key}: is not a key of this chart",
         "in podSecurityContext")
        for group in ("pods", "trainer")
        for key, value in (
            ("securityContext", "{runAsUser: 5000}"), ("fsGroup", 5000),
            ("supplementalGroups", [5000]),
        )
    ),
    ("environment: {minReplicas: 0, maxReplicas: 10}",
     "environment.minReplicas, maxReplicas", "never add or remove a pod", "set replicas"),
    *(
        (f"{key}: {{replicas: 1}}", f"{key}: is not a key of this chart, expected one group",
         f"put its values into {group}")
        for key, group in (
            ("environment2", "environment"), ("trainer-b200", "trainer"),
            ("inferenceLarge", "inference"), ("environments", "environment"),
        )
    ),
    ("checkpoints: {uri: 's3://a/b'}", "checkpoints.uri: is not a key of this chart",
     "existingClaim"),
    ("config: {model: {tiny: null, path: a/b, revision: abc}}",
     "config.model.revision: is not a key of this chart", "modelCache.revisions"),
    ("config: {model: {tiny: null, path: 's3://a/b'}}",
     "config.model.path: got s3://a/b, expected the name of a model on a hub, or a directory"),
    ("config: {algorithm: {reference: 'hf://a/b'}}", "config.algorithm.reference: got hf://a/b"),
    *(
        (f"{key}: {{accessModes: [{mode}]}}", f"{key}.accessModes: got {mode}, expected", "Many")
        for key in ("checkpoints", "modelCache")
        for mode in ("ReadWriteOncePod", "ReadOnlyMany")
    ),
    ("database: {accessModes: [ReadWriteMany]}",
     "database.accessModes: got ReadWriteMany, expected ReadWriteOnce or ReadWriteOncePod"),
    ("trainer: {capabilities: {add: [IPC_LOCK]}}",
     "trainer.capabilities: got IPC_LOCK for user 1000", "LimitMEMLOCK"),
    *(
        (f"trainer: {{podSecurityContext: {{runAsUser: {user}}}}}",
         f"podSecurityContext.runAsUser: got {first} for", f"and {last} for", "set it in pods")
        for user, first, last in ((0, 0, 1000), (1000700000, 1000, 1000700000))
    ),
    ("{trainer: {hostNetwork: true}, networkPolicy: {enabled: true, operatorNamespace: ray}}",
     "trainer.hostNetwork: got true with networkPolicy.enabled"),
    ("pods: {dnsPolicy: None}", "head.dnsPolicy: got None without dnsConfig"),
    ("{pods: {livenessProbe: {tcpSocket: {port: 6379}}}, "
     "head: {livenessProbe: {exec: {command: ['true']}}}}",
     "head.livenessProbe: got exec and tcpSocket, expected only one of them"),
    ("head: {startupProbe: {successThreshold: 2}}",
     "head.startupProbe.successThreshold: got 2, expected 1"),
    ("trainer: {resources: {claims: [{name: gpu}]}}",
     "trainer.resources.claims: got gpu, expected a name from resourceClaims (none)"),
    ("trainer: {resourceClaims: [{name: gpu}]}",
     "trainer.resourceClaims: gpu has both or neither"),
    ("trainer: {resourceClaims: [{name: gpu, resourceClaimTemplateName: a}, {name: gpu, "
     "resourceClaimTemplateName: a}]}",
     "trainer.resourceClaims: gpu is set twice"),
    ("{config: {trainer: {device: cuda, gpus_per_rank: 1}}, trainer: {gpus: 2, gpuResource: ''}}",
     "trainer.gpuResource: got none, and resources.claims has none, with 2 gpus"),
    ("{database: {existingClaim: one}, modelCache: {enabled: true, existingClaim: one}}",
     "database.existingClaim: got one, which is also modelCache.existingClaim"),
    ("rayVersion: 2.51.0", "rayVersion: got 2.51.0", "2.52.0 or newer"),
    ("{networkPolicy: {enabled: true, operatorNamespace: ray}, "
     "database: {existingSecret: postgres}, gcs: {backend: redis, "
     "redis: {address: 'redis:6379'}}}",
     "networkPolicy.egress: got none", "could not reach the database, Redis;"),
    ("networkPolicy: {enabled: true}", "networkPolicy.operatorNamespace", "namespace"),
    # Each environment actor loads the tokenizer.
    ("{networkPolicy: {enabled: true, operatorNamespace: ray, egress: [{}]}, "
     "config: {model: {tiny: null, path: Qwen/Qwen3-0.6B}}}",
     "networkPolicy.environmentEgress: got none", "modelCache.enabled"),
    ("head: {env: [{name: RAY_AUTH_TOKEN, value: x}]}", "head.env: RAY_AUTH_TOKEN", "remove it"),
    *(
        (values, f"{key}: got {got}, which is {number} bytes, expected at least 64Mi", remedy)
        for values, key, got, number, remedy in (
            ("checkpoints: {size: 20}", "checkpoints.size", 20, 20, "such as 20Gi"),
            ("checkpoints: {size: 20m}", "checkpoints.size", "20m", 0, "such as 20Gi"),
            ("database: {size: 5M}", "database.size", "5M", 5000000, "raise it"),
            ("modelCache: {enabled: true, size: 0Gi}", "modelCache.size", "0Gi", 0, "raise it"),
            ("gcs: {backend: rocksdb, storage: {size: 1}}",
             "gcs.storage.size", 1, 1, "such as 20Gi"),
        )
    ),
    *(
        (f"workspace: {{files: {{{name}.py: x}}}}",
         f"workspace.files: got {name}.py, which hides the module {name}", "rename it")
        for name in ("ray", "service", "random", "winreg", "tty", "webbrowser")
    ),
    ("pods: {env: [{name: RAY_ADDRESS, value: 'a:1'}]}",
     "head.env: RAY_ADDRESS is set by the operator", "remove it"),
    *(
        (f"image: {{repository: '{name}'}}", f"image.repository: got {name}", "without https://")
        for name in ("https://reg.example/rayloom", "reg.example//rayloom", "rayloom/")
    ),
    ("gcs: {backend: redis, redis: {address: 'redis:99999'}}",
     "gcs.redis.address: got port 99999", "such as redis:6379"),
    ("serviceAccount: {name: default}", "serviceAccount.name: got default", "set create to false"),
    ("serviceAccount: {create: false, annotations: {a: b}}",
     "serviceAccount.annotations: got annotations with create false", "set create to true"),
    ("gcs: {redis: {address: 'redis:6379'}}",
     "gcs.redis.address: got redis:6379 with gcs.backend memory", "expected backend redis"),
    ("auth: {ray: {mode: disabled, existingSecret: a}}",
     "auth.ray.existingSecret: got a with auth.ray.mode disabled", "expected mode token"),
    ("{kueue: {queueName: a, priorityClass: b}, labels: {kueue.x-k8s.io/queue-name: c, "
     "kueue.x-k8s.io/priority-class: d}}",
     "labels: got c of kueue.x-k8s.io/queue-name, but kueue.queueName is a",
     "labels: got d of kueue.x-k8s.io/priority-class, but kueue.priorityClass is b"),
    *(
        (f"monitoring: {{podMonitor: {{dropSeries: '{text}'}}}}",
         f"monitoring.podMonitor.dropSeries: got {text}, which is not a regular expression")
        for text in ("ray_(.*", "a)|(b", "[a")
    ),
    ("pods: {volumes: [{name: certs}]}",
     "head.volumes: got no source for certs, expected one source", "empty directory"),
    ("pods: {volumes: [{name: certs, secret: {secretName: c}, configMap: {name: d}}]}",
     "trainer.volumes: got configMap and secret for certs, expected one source"),
    # No pod has these files.
    *(
        (f"config: {config}", f"config.{key}: got {path}, which the pods of head do not have",
         "add the file to workspace.files")
        for path, key, config in (
            ("/workspace/a", "tasks.file", "{tasks: {file: /workspace/a}}"),
            ("/tmp/a", "tasks.dataset", "{tasks: {dataset: /tmp/a}}"),
            ("/workspace/a", "mixture.x.tasks.file",
             "{tasks: null, mixture: {x: {tasks: {environment: guessing, file: /workspace/a}}}}"),
            ("/workspace/a", "evaluation.sets.x.file",
             "{evaluation: {sets: {x: {file: /workspace/a}}}}"),
            ("/workspace/a", "algorithm.reference", "{algorithm: {reference: /workspace/a}}"),
        )
    ),
    *(
        (f"config: {config}", f"got {path}, expected an absolute path in the pods")
        for path, config in (
            ("./qwen", "{model: {tiny: null, path: ./qwen}}"),
            ("a.jsonl", "{tasks: {file: a.jsonl}}"), ("a.csv", "{tasks: {dataset: a.csv}}"),
        )
    ),
    ("{workspace: {files: {a: x}}, config: {tasks: {file: /workspace/b}}}",
     "config.tasks.file: got /workspace/b", "workspace.files has a)"),
    ("{workspace: {mountPath: /ws, existingClaim: c}, config: {tasks: {file: /workspace/a}}}",
     "config.tasks.file: got /workspace/a, which the pods of head do not have"),
    ("config: {model: {tiny: null, path: /home/rayloom/m}}",
     "config.model.path: got /home/rayloom/m, which the pods of trainer do not have"),
]  # fmt: skip
# `make test` runs these too.
QUICK: list[Case] = [
    *((f"monitoring: {{podMonitor: {{enabled: true, seriesLabels: {{{label}: a}}}}}}",
       "seriesLabels") for label in ("release", "namespace", "run", "__name__", "a-b")),
    *((f"monitoring: {{rules: {{enabled: true, {key}: {value}}}}}",
       f"monitoring.rules.{key}: got RayloomNoSuch, which is not an alert, expected one of Rayloom")
      for key, value in (("disabled", "[RayloomNoSuch]"), ("labelsOf", "{RayloomNoSuch: {a: b}}"))),
    *((f"{{config: {{tasks: {{dataset: x/y}}}}, modelCache: {cache}}}", words) for cache, words in (
        (f"{{enabled: true, revisions: {{a/b: {COMMIT}}}}}", "got a/b, expected hub names"),
        (f"{{enabled: false, revisions: {{x/y: {COMMIT}}}}}", "without modelCache.enabled"),
        ("{enabled: true, revisions: {x/y: main}}", "revisions"),
    )),
]  # fmt: skip
ACCEPTED = [
    "pods: {labels: {example.org/team: a.b_c-1, empty: ''}}",
    "trainer: {shmSize: 94Mi}",
    "{mode: job, config: {tasks: null, mixture: {a: {weight: 1, tasks: {environment: guessing}}}}}",
    "image: {repository: 'registry.example:5000/team/rayloom'}",
    f"config: {{tasks: {{options: {{high: {2**53 - 1}}}}}}}",
    "checkpoints: {mountPath: /mnt/runs}",
    "modelCache: {enabled: true, mountPath: /checkpoints/models}",
    "pods: {tolerations: [{operator: Exists}, "
    "{key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 3}], "
    "topologySpreadConstraints: "
    "[{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]}",
    "pods: {hostAliases: [{ip: 10.0.0.255, hostnames: [db]}, {ip: '::1', hostnames: [db]}, "
    "{ip: '::ffff:1.2.3.4', hostnames: [db]}], tmpSize: 64Mi, homeSize: '0'}",
    "monitoring: {podMonitor: {enabled: true, interval: 1m, scrapeTimeout: 59s500ms}}",
    *(
        f"{{config: {{model: {{tiny: null, path: /data/m}}, tasks: {{file: {file}}}}}, pods: {{"
        "volumes: [{name: data, persistentVolumeClaim: {claimName: d}}], "
        f"volumeMounts: [{{name: data, mountPath: /data}}]}}, {more}}}"
        for file, more in (
            ("/workspace/a", "workspace: {files: {a: x}}"),
            ("/workspace/a/b", "workspace: {existingClaim: c}"),
            ("/usr/share/a", "modelCache: {enabled: false}"),
            ("/tmp/a", "head: {initContainers: [{name: copy, image: x}]}"),
        )
    ),
    *(
        f"{{config: {{tasks: {{file: /workspace/a}}}}, {more}}}"
        for more in (
            "image: {repository: reg.example/mine}",
            "head: {image: {tag: with-tasks}}",
            "workspace: {mountPath: /ws, existingClaim: c}, image: {repository: reg.example/mine}",
        )
    ),
    "{mode: cluster, config: {tasks: {file: a}}}",
    # Only the image knows whether it has this model; the data set is a directory of the workspace.
    "config: {model: {tiny: null, path: /models/qwen}}",
    "{workspace: {files: {train.jsonl: x}}, config: {tasks: {dataset: /workspace/}}}",
    # Sizes of claims that the chart does not make, and an owner that the volume sets.
    "{checkpoints: {existingClaim: c, size: 1Mi}, database: {existingSecret: d, size: 1Mi}, "
    "modelCache: {size: 1Mi}, gcs: {storage: {size: 1Mi}}, "
    "trainer: {podSecurityContext: {runAsUser: 1001}}}",
    "monitoring: {podMonitor: {dropSeries: '(?i)ray_(a|b)[.]x+'}}",
    "{kueue: {queueName: a}, labels: {kueue.x-k8s.io/queue-name: a}, "
    "serviceAccount: {create: false, name: default}}",
    "head: {sidecars: [{name: client, image: x, env: [{name: RAY_ADDRESS, value: 'ray:1'}]}]}",
    "workspace: {files: {my_ray.py: x, ray.jsonl: x}}",
    # No process of a run imports these modules of Python, or none needs them.
    "workspace: {files: {turtle.py: x, chunk.py: x, antigravity.py: x, code.py: x}}",
    # Volumes for certificates, and a disk in each pod for objects that Ray spills.
    "pods: {volumes: [{name: certificates, configMap: {name: c}}, "
    "{name: scratch, hostPath: {path: /nvme}}], volumeMounts: ["
    "{name: certificates, mountPath: /etc/ssl/own}, {name: scratch, mountPath: /tmp/ray}]}",
]


def refused(values: str, *files: Path) -> str:
    with pytest.raises(HelmError) as refusal:
        rendered(yaml.safe_load(values), *files)
    return str(refusal.value)


def each_of(cases: list[Case]) -> pytest.MarkDecorator:
    ids = [case[0][:70] for case in cases]
    return pytest.mark.parametrize(
        ("values", "words"), [(values, words) for values, *words in cases], ids=ids
    )


@in_proof
@each_of(MISSPELT)
def test_a_wrong_value_is_refused_with_its_path(values: str, words: list[str]) -> None:
    # Helm 4 writes /trainer/gpus, helm 3 trainer.gpus.
    text = refused(values).replace("/", ".").replace("is not", "not")
    assert [word for word in words if word not in text] == []


@in_proof
@each_of(CONTRADICTIONS)
def test_contradictory_values_are_refused_with_a_remedy(values: str, words: list[str]) -> None:
    text = refused(values)
    assert [word for word in ("these values are refused", *words) if word not in text] == []


@each_of(QUICK)
def test_a_name_that_the_chart_cannot_use_is_refused(values: str, words: list[str]) -> None:
    text = refused(values)
    assert [word for word in words if word not in text] == []


@in_proof
@pytest.mark.parametrize("values", ACCEPTED, ids=[each[:70] for each in ACCEPTED])
def test_values_similar_to_refused_ones_are_accepted(values: str) -> None:
    rendered(yaml.safe_load(values))


@in_proof
@pytest.mark.parametrize("key", ["inference.num_replicas", "trainer.num_ranks"])
def test_more_parts_than_fit_on_the_shared_pod_are_refused(key: str) -> None:
    text = refused(json.dumps({"config": nested(key, 2)}), *VARIANTS["shared-gpu"])
    assert "beside the engines (trainer.replicas is 0)" in text


@in_proof
def test_the_smallest_shared_memory_fits_rays_smallest_object_store() -> None:
    assert ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES == 75 * 1024**2
    assert 0.8 * 93 * 1024**2 < 75 * 1024**2 <= 0.8 * 94 * 1024**2


@in_proof
def test_all_contradictions_are_reported_at_once() -> None:
    text = refused("{trainer: {rayCpus: 1}, rayVersion: 2.40.0}")
    assert "trainer: 1 pods" in text and "rayVersion" in text


@in_proof
def test_the_refusal_on_the_page_is_up_to_date() -> None:
    document = (CHART.parent / "docs" / "deploy.md").read_text("utf-8")
    [shown] = re.findall(r"```\n(Error: .*?)\n```", document, re.S)
    text = refused(
        "{hub: {existingSecret: hub}, trainer: {env: [{name: HF_TOKEN, value: x}]}, "
        "config: {trainer: {num_ranks: 9}}}"
    )
    for line in shown.splitlines():
        assert line.removesuffix(" ...") in text


def test_a_cluster_that_is_too_old_is_refused() -> None:
    with pytest.raises(HelmError, match="kubeVersion"):
        rendered(options=["--kube-version", "1.26.0"])


def test_without_a_configuration_only_a_development_cluster_is_rendered() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["config"] == {}
    assert "0 chart(s) failed" in lint()
    helm("template", "demo", CHART, "--set", "mode=cluster")
    for option, words in (
        ("mode=service", r"config: got none.*values-cpu-dev\.yaml"),
        ("mode=job", "config: got none"),
        ("config.model.path=x", "config: has no model, or neither tasks nor a mixture"),
    ):
        with pytest.raises(HelmError, match=words):
            helm("template", "demo", CHART, "--set", option)
