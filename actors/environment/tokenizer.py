"""A model's tokenizer, and the tokens that end a turn.

`rendering`, the engines' parsers and the checks before a start use this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    chat_template: Any

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...


# The value of model.chat_template for raw prompts, which have no chat template.
RAW = "none"
# This template is exported with the model, so that later servers render messages in the same way.
_RAW_BODY = """
{%- for message in messages -%}
{%- if message.role not in ['user', 'assistant'] or message.tool_calls -%}
{{- raise_exception("a raw prompt has no roles and no calls, and got a message of role " +
    message.role + (" that calls" if message.tool_calls else "") + "; expected texts of user and "
    "assistant, which are joined as they are: write it into the prompt's text, or set "
    "model.chat_template to a file") -}}
{%- endif -%}
{{- message.content -}}
{%- endfor -%}"""
# Tokenizer classes that load without AutoTokenizer.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_TOO_LONG_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
# A tokenizer may add ids at the beginning of a text. To encode a text without them, encode it after
# one of these texts.
_BEFORE = (".", "0", "a", "\n")


def load_tokenizer(path: str, *, chat_template: str | None = None) -> ChatTokenizer:
    """Return a model's tokenizer.

    Args: path: A directory or hub name. chat_template: Jinja text; RAW for raw prompts; None to
    keep the tokenizer's own template.
    Raises: OSError or ValueError if the tokenizer cannot be loaded.
    """
    return with_template(_loaded(path), chat_template)


def with_template(tokenizer: ChatTokenizer, chat_template: str | None) -> ChatTokenizer:
    """Set a tokenizer's chat template, and return the tokenizer.

    Args: chat_template: Jinja text; RAW for raw prompts; None to keep the tokenizer's own template.
    """
    if chat_template == RAW:
        tokenizer.chat_template = _raw_template(tokenizer)
    elif chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


class RawPrompts:
    """An encoder of prompts without roles.

    A prompt's text is encoded unchanged, after the ids that the tokenizer puts before every text.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = ids_before_text(tokenizer)
        self._shown_before = tokenizer.decode(self._before, skip_special_tokens=False)

    def first(self, rendered: str) -> list[int]:
        """Return the ids of a chat's first prompt, whose text the template has rendered.

        If the tokenizer puts BOS before a text, the ids begin with BOS once, even if the text
        itself begins with BOS.
        """
        text = rendered.removeprefix(self._shown_before)
        return self._before + self._tokenizer.encode(text, add_special_tokens=False)

    def appended(self, rendered: str) -> list[int]:
        """Return the ids of a text that is appended to a prompt, without BOS."""
        text = rendered.removeprefix(self._shown_before)
        for before in _BEFORE:
            head = self._tokenizer.encode(before, add_special_tokens=False)
            whole = self._tokenizer.encode(before + text, add_special_tokens=False)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self._tokenizer.encode(text, add_special_tokens=False)


def is_raw(tokenizer: ChatTokenizer) -> bool:
    """Return whether a tokenizer's chat template is the template of raw prompts.

    This is also true of the tokenizer of an exported model that was trained on raw prompts.
    """
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and template.endswith(_RAW_BODY)


def ids_before_text(tokenizer: ChatTokenizer) -> list[int]:
    """Return the ids that a tokenizer puts before every text, which are BOS or none.

    Ids that the tokenizer puts after a text (EOS) are left out, because the policy continues the
    text.
    """
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(whole) - len(plain) + 1)
    start = next((each for each in starts if whole[each : each + len(plain)] == plain), 0)
    return whole[:start]


def _raw_template(tokenizer: ChatTokenizer) -> str:
    before = tokenizer.decode(ids_before_text(tokenizer), skip_special_tokens=False)
    if not before:
        return _RAW_BODY
    quoted = json.dumps(before, ensure_ascii=False)
    return (
        f"{{%- if not (messages and messages[0].content.startswith({quoted})) -%}}"
        f"{{{{- {quoted} -}}}}{{%- endif -%}}{_RAW_BODY}"
    )


def _loaded(path: str) -> ChatTokenizer:
    import transformers  # takes a second; rendering does not need it

    config = _read(Path(path) / "tokenizer_config.json")
    # AutoTokenizer imports torch (seconds, 200 MB), which a plain fast tokenizer does not need.
    is_plain = config.get("tokenizer_class") in _PLAIN or _is_misread(Path(path), config)
    loader = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
    try:
        # Without this argument transformers asks in the terminal whether to run the model's code.
        tokenizer: Any = loader.from_pretrained(path, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:
        # For a damaged file the libraries raise errors of any type.
        damaged = _damaged(Path(path))
        if damaged is None and isinstance(error, ValueError):
            # The files can be read; the error says what else is missing.
            raise
        damaged = damaged or Path(path) / "tokenizer.json"
        raise ValueError(
            f"{damaged} cannot be loaded ({type(error).__name__}: {error}); "
            "expected a tokenizer that transformers saved; copy or download the model again"
        ) from error
    if config.get("add_bos_token") and not ids_before_text(tokenizer):
        # transformers 5 drops the setting if it loads another class than the configuration names.
        tokenizer.add_bos_token = True
    # transformers would print once that a long text leads to indexing errors, although the limits
    # of the configuration apply here.
    tokenizer.deprecation_warnings[_TOO_LONG_WARNING] = True
    found: ChatTokenizer = tokenizer
    return found


def _damaged(directory: Path) -> Path | None:
    """Return the first of a tokenizer's files that cannot be read; None if all can be read."""
    for file in sorted((*directory.glob("*token*.json"), *directory.rglob("*.jinja"))):
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".json":
                json.loads(text)
        except ValueError:
            return file
    return None


def _is_misread(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether transformers 5 would load the wrong class of tokenizer and lose letters."""
    # DeepSeek's configuration, for one, names Llama's class, but its vocabulary is byte-level.
    if not str(config.get("tokenizer_class")).startswith("LlamaTokenizer"):
        return False
    parts = _read(path / "tokenizer.json").get("pre_tokenizer") or {}
    return any(each.get("type") == "ByteLevel" for each in (parts, *parts.get("pretokenizers", ())))


def _read(file: Path) -> dict[str, Any]:
    found: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def tokenizer_fingerprint(tokenizer: ChatTokenizer) -> str:
    """Return a digest of a tokenizer's chat template and vocabulary with added tokens.

    External agents that sample elsewhere compute it in the same way from a Hugging Face tokenizer.
    Returns: "sha256:" and a hexadecimal digest; equal templates and vocabularies give equal
    digests.
    """
    content = {"chat_template": tokenizer.chat_template, "vocab": tokenizer.get_vocab()}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{sha256(text.encode()).hexdigest()}"


def stop_token_ids(model: str) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a model directory or hub name, ascending.

    Raises: ValueError if the model has no such id, because its answers would never end.
    """
    ids = stop_ids_of(model, load_tokenizer(model))
    if not ids:
        raise ValueError(
            f"model {model}: neither its tokenizer nor its generation settings name an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return ids


def stop_ids_of(model: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Return a model's end-of-sequence ids, ascending; empty if the model has none.

    Raises: ValueError if the generation settings name something that is not a token id.
    """
    added: Any = _added_by_settings(model)
    ids = added if isinstance(added, list) else [] if added is None else [added]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(
            f"{Path(model) / 'generation_config.json'}: eos_token_id is {added!r:.80}, expected "
            "the id of a token, or a list of ids; correct it (in config.json if the model has no "
            "generation_config.json)"
        )
    found = {tokenizer.eos_token_id, *ids}
    return tuple(sorted(token for token in found if token is not None))


def _added_by_settings(model: str) -> list[int] | int | None:
    """Return a model's eos_token_id, from generation_config.json or from the configuration."""
    directory = Path(model)
    # The classes of transformers would read the same, but their import takes two seconds.
    # As in vLLM, this file replaces the configuration even if it has no eos_token_id.
    if (file := directory / "generation_config.json").is_file():
        return _read(file).get("eos_token_id")
    if (written := _read(directory / "config.json").get("eos_token_id")) is not None:
        return written
    from transformers import AutoConfig, GenerationConfig

    try:
        if not directory.is_dir():
            return GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        pass  # The hub has no such file.
    try:
        # The class of a configuration has defaults too: LlamaConfig's end is token 2.
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        texts = config.get_text_config(decoder=True)
    except Exception:  # noqa: BLE001  # a class of a configuration may raise any error
        return None  # The engines refuse such a model.
    ends = (getattr(each, "eos_token_id", None) for each in (config, texts))
    return next((each for each in ends if each is not None), None)
