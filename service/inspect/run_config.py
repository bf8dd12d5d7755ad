"""The configuration that lies beside a journal: which model to read with, how many steps are kept.

A journal that was copied alone has none, and is looked at without.
"""

from __future__ import annotations

from service.config.file import ConfigError, load_config
from service.config.tree import Config
from service.launch.run_dir import RunDir


def config_beside(run_dir: RunDir) -> Config:
    """Raises: ConfigError where there is none, or none that can be read."""
    if not run_dir.config_file.is_file():
        raise ConfigError(f"there is no {run_dir.config_file.name} beside the journal")
    try:
        return load_config(run_dir.config_file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run_dir.config_file} cannot be read ({error})") from error
