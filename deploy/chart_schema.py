"""Generate the parts of the chart that come from other sources: `python -m deploy.chart_schema`.

- helm/values.schema.json is written by hand except for two parts. `properties.config` is the schema
  of the configuration tree, and the definitions `io.k8s.…` are copied from Kubernetes' strict
  schema. With these parts, helm refuses unknown keys and typos.
- helm/files/config-defaults.yaml has the configuration's defaults that the templates read.
- helm/files/module-names.txt has the names of modules that a run imports. A file in
  `workspace.files` with such a name would hide the module and is refused.

Tests compare each file with its source. This module needs the development tools.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rayloom import RESERVED_NAMES
from service.config.file import config_schema, dump_config, parse_config

CHART = Path(__file__).parents[1] / "helm"
SCHEMA = CHART / "values.schema.json"
DEFAULTS = CHART / "files" / "config-defaults.yaml"
NAMES = CHART / "files" / "module-names.txt"
KUBERNETES = "1.36"
# Sections with the numbers of a run's parts, their resources, and the rollouts of a task.
_READ_BY_TEMPLATES = ("run", "rollouts", "algorithm", "inference", "trainer")
# Sections of which a configuration has exactly one.
_EITHER = ("tasks", "mixture")
_REFERENCE = "#/properties/config/$defs/{model}"
# Keys that helm does not use; the application has its own defaults.
_LEFT_OUT = {"title", "default"}
_LEFT_OUT_OF_KUBERNETES = {"description", "format"}
# What the processes of a run import beside Rayloom's own modules, some only if it is configured.
_IMPORTED = (
    "bm25s", "datasets", "gymnasium", "mcp", "ray._private.log_monitor",
    "ray._private.workers.default_worker", "ray.autoscaler._private.monitor",
    "ray.dashboard.agent", "ray.dashboard.dashboard", "ray.serve", "s3fs",
    "skyrl_gym.envs.registration", "tensorboardX.event_file_writer", "textarena.envs.registration",
    "torch._inductor.compile_fx", "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto", "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu_worker", "wandb",
)  # fmt: skip
# What trackio imports; Rayloom's environments and images do not have it.
_BY_TRACKIO = {"nt", "wave", "webbrowser"}
# Names that are looked up without success are included: with a file winreg.py, mimetypes fails.
_TRIED = """
import sys
tried = {*sys.modules}
sys.addaudithook(lambda event, given: tried.add(given[0]) if event == "import" else None)
import importlib, pkgutil
import actors, rayloom, service
for package in actors, rayloom, service:
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*tried)
"""
# pdb, which torch imports, needs `code` only for its command `interact`.
_HARMLESS = {"code"}
_DEFINITION = re.compile(r"#/\$defs/(io\.k8s\.[\w.-]+)")


def schema_text(written: str) -> str:
    """Return the chart's schema with its generated parts replaced by new ones.

    written: text of the current helm/values.schema.json.
    """
    schema = json.loads(written)
    config = _stripped(config_schema(_REFERENCE), _LEFT_OUT)
    own = {name: node for name, node in schema["$defs"].items() if not name.startswith("io.k8s.")}
    # helm allows an empty section, which is the default; the templates report missing keys.
    del config["required"]
    # The schema allows a revision, because the templates refuse it with a better message:
    # revisions are set in modelCache.revisions.
    config["$defs"]["ModelSettings"]["properties"]["revision"] = True
    # With null, a values file removes a section that another values file has set.
    for section in _EITHER:
        config["properties"][section] = {"anyOf": [config["properties"][section], {"type": "null"}]}
    properties = {**schema["properties"], "config": config}
    schema |= {"properties": properties, "$defs": own}
    schema["$defs"] = own | _kubernetes_definitions(schema)
    return json.dumps(schema, indent=2) + "\n"


def defaults_text() -> str:
    """Return, as YAML, the configuration's defaults that the chart's templates read."""
    tree: dict[str, Any] = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    whole = yaml.safe_load(dump_config(parse_config(tree, source="of the defaults")))
    read = {section: whole[section] for section in _READ_BY_TEMPLATES}
    return "# Written by `python -m deploy.chart_schema`.\n" + yaml.safe_dump(read, sort_keys=False)


def module_names() -> list[str]:
    """Return the names of modules that a file in `workspace.files` must not hide.

    These are Rayloom's packages, its libraries, and the modules of the standard library that a run
    imports. To find the last, a new process imports a run's packages, which takes half a minute.
    """
    command = [sys.executable, "-c", _TRIED, *_IMPORTED]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    tried = {name for name in printed.splitlines()[-1].split() if name[0] != "_"}
    return sorted({*RESERVED_NAMES, *_BY_TRACKIO, *(tried & sys.stdlib_module_names - _HARMLESS)})


def _kubernetes_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that the schema refers to, directly or indirectly, by name."""
    folder = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
    text = files("kubernetes_validate").joinpath(folder, "_definitions.json").read_text("utf-8")
    known = json.loads(text)["$defs"]
    found: dict[str, Any] = {}
    wanted = set(_DEFINITION.findall(json.dumps(schema)))
    while wanted:
        name = wanted.pop()
        found[name] = _without_null(_stripped(known[name], _LEFT_OUT_OF_KUBERNETES))
        wanted |= set(_DEFINITION.findall(json.dumps(found[name]))) - set(found)
    return dict(sorted(found.items()))


def _stripped(node: Any, left_out: set[str], *, is_properties: bool = False) -> Any:
    """Return a schema without the keys in left_out and without those that begin with x-kubernetes-.

    is_properties: whether the keys of `node` are names of properties, which are all kept.
    """
    if isinstance(node, list):
        return [_stripped(item, left_out) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _stripped(
            value, left_out, is_properties=key in ("properties", "$defs") and not is_properties
        )
        for key, value in node.items()
        if is_properties or not (key in left_out or key.startswith("x-kubernetes-"))
    }


def _without_null(node: Any) -> Any:
    """Return a schema that refuses null."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _without_null(value) for key, value in node.items()}
    if isinstance(plain.get("type"), list):
        # Kubernetes ignores a key without a value; in a values file such a key is a mistake.
        [plain["type"]] = [kind for kind in plain["type"] if kind != "null"]
    return plain


if __name__ == "__main__":
    DEFAULTS.write_text(defaults_text(), "utf-8")
    NAMES.write_text(textwrap.fill(" ".join(module_names()), 100) + "\n", "utf-8")
    SCHEMA.write_text(schema_text(SCHEMA.read_text("utf-8")), "utf-8")
