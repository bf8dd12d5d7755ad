"""The one configuration tree: all the sections, and that they agree.

`file.py` reads a tree from YAML, `preflight.py` checks it against the machine, and `settings_of.py`
makes of it the small settings of each room: pure functions never see the tree.
"""

from __future__ import annotations

from pydantic import model_validator

from service.config.disagreements import disagreements
from service.config.sections import Sections


class Config(Sections):
    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        for problem in disagreements(self):
            raise ValueError(problem)
        return self
