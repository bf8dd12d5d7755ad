"""Record the tasks, the user's own modules and the model's files with which a run was started.

A configuration has only names of these. In another directory, or after a change, the names may
refer to other files; therefore `sources.json` in the run's directory records the files.
`service.launch.run_dir` calls this module before a start or resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from actors.environment.builtin.tools import TOOLS
from actors.environment.tasks import FileTasks, MixedTasks
from actors.environment.user_names import module_of
from actors.options import data_paths
from service.config.file import FUNCTIONS, ConfigError
from service.config.sections import TasksSettings
from service.config.tasks import open_tasks, options_read, own_names
from service.config.tree import Config

# Files of a model's directory that decide prompts and tokens. Others may be added during a run,
# such as the results of an evaluation.
_PROMPT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The tasks and files to which a configuration's names refer when a run is started."""

    tasks: str
    """Digest of the tasks of a file or data set; empty if the tasks are generated from the seed."""
    modules: dict[str, str]
    """Path of each of the user's own modules, by the module's name."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Absolute path of each file that a command of an MCP server names, by the path in the command.
    """
    model: dict[str, str] = field(default_factory=dict)
    """Digest of each file that decides prompts and tokens, by its name in the model's directory;
    empty for a model of a hub and for the tiny model.
    """


def sources_of(config: Config) -> Sources:
    """Return the tasks and files to which a configuration's names refer. Raises: ConfigError."""
    tasks = open_tasks(config)
    modules = {}
    for name in user_modules(config):
        spec = find_spec(name)
        modules[name] = str(spec.origin) if spec is not None else ""
    scripts = {str(path): str(path.resolve()) for path in user_scripts(config)}
    digest = tasks.digest if isinstance(tasks, FileTasks | MixedTasks) else ""
    model = _model_files(config.model.path)
    return Sources(tasks=digest, modules=modules, scripts=scripts, model=model)


def _model_files(model: str | None) -> dict[str, str]:
    """Return digests of a model directory's files of settings, tokenizer and chat template."""
    directory = Path(os.path.expanduser(model or ""))
    if model is None or not directory.is_dir():
        return {}
    try:
        # Files with weights are too large to be read at each start.
        return {
            file.name: blake2b(file.read_bytes(), digest_size=16).hexdigest()
            for file in sorted(directory.iterdir())
            if any(fnmatchcase(file.name, pattern) for pattern in _PROMPT_FILES) and file.is_file()
        }
    except OSError as error:
        raise ConfigError(
            f"model.path: {error.filename} cannot be read ({error.strerror}); expected a model's "
            "directory with readable files; correct their permissions"
        ) from error


def user_modules(config: Config) -> list[str]:
    """Return the names of the user's own modules that a configuration uses.

    These modules define environments, functions that the environments' options name, a shadow
    verifier, or a tracker.
    """
    shadow, tracker = config.audit.shadow, config.trackers.own
    own = [] if shadow is None else [module_of(shadow, what="audit.shadow")]
    if tracker is not None:
        own.append(module_of(tracker.use, what="trackers.own.use"))
    of_tasks = [m for each in config.members.values() for m in _modules(each.tasks)]
    return list(dict.fromkeys([*of_tasks, *own]))


def user_scripts(config: Config) -> list[Path]:
    """Return the files that the commands of the configuration's MCP servers name.

    The paths are as written in the commands. Raises: ConfigError.
    """
    found = [
        path
        for each in config.members.values()
        if each.tasks.environment == TOOLS
        for server in (options_read(each.tasks).mcp or {}).values()
        for path in server.files
    ]
    return list(dict.fromkeys(found))


def data_files(config: Config) -> list[Path]:
    """Return the data files that the options of built-in environments name by relative paths.

    Raises: ConfigError.
    """
    return [
        path
        for each in config.members.values()
        # A user's own environment is shipped by its module.
        if ":" not in each.tasks.environment
        for path in data_paths(options_read(each.tasks))
        if not path.is_absolute()
    ]


def _modules(tasks: TasksSettings) -> list[str]:
    if ":" in tasks.environment:
        return [tasks.environment.partition(":")[0]]
    return [module_of(name, what="tasks.options") for name in own_names(tasks)]


def write_sources(file: Path, sources: Sources) -> None:
    """Write the tasks, and the modules and scripts that are the user's own, to `sources.json`.

    Raises: OSError.
    """
    own = replace(sources, modules=_own(sources.modules), scripts=_own(sources.scripts))
    file.write_text(json.dumps(asdict(own), indent=1) + "\n")


def _own(files: Mapping[str, str]) -> dict[str, str]:
    return {name: file for name, file in files.items() if _is_own(Path(file))}


def _is_own(file: Path) -> bool:
    """Return whether a file is the user's own and should have the same path at a resume."""
    # Ray unpacks a packaged working directory to another path on each cluster.
    moves = {"site-packages", "runtime_resources"} & set(file.parts)
    return file.is_relative_to(Path.cwd()) and not moves


def check_sources(file: Path, sources: Sources) -> None:
    """Check that a run resumes with the tasks and files with which it began.

    Only the paths of the user's modules and scripts are compared, so their contents may change. The
    tasks are compared by their digest.

    Args: file: the run's `sources.json`; if it is missing, as in a run of an older version, nothing
    is checked. sources: the tasks and files now.
    Raises: ConfigError.
    """
    try:
        before = Sources(**json.loads(file.read_text()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file}: it cannot be read ({error}); restore it") from error
    if sources.tasks != before.tasks:
        raise ConfigError(
            "tasks.file, tasks.dataset: the tasks are not those that the run began with; expected "
            "the same, because the order of the tasks depends on them; restore them, or start a "
            "new run"
        )
    # Runs of older versions, and models of a hub, have no digests.
    files = sources.model.keys() | before.model.keys() if sources.model and before.model else ()
    for name in sorted(files):
        if sources.model.get(name) != before.model.get(name):
            raise ConfigError(
                f"model.path: {name} in the model's directory is not as it was when the run began; "
                "expected the same, because prompts and tokens depend on it; restore the file, or "
                "start a new run"
            )
    for what, now, then in (
        ("module", sources.modules, before.modules),
        ("script", sources.scripts, before.scripts),
    ):
        for name, origin in now.items():
            began = then.get(name, origin)
            # What the run itself stores moves with its directory.
            is_stored = Path(origin).is_relative_to(file.parent / FUNCTIONS)
            if origin != began and not is_stored:
                raise ConfigError(
                    f"the {what} {name} is {origin or 'missing'}, the run began with {began}; "
                    f"start where the run was started; if the file was moved, correct {file}"
                )
