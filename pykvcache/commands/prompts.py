# SPDX-License-Identifier: Apache-2.0
"""How a prompt is given to a command: as text, or as a file of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pykvcache.errors import ConfigError
from pykvcache.prompts import Group, groups_of_tokens, key_facts

PromptOption = Annotated[
    str, typer.Option("--prompt", help="A prompt, as the completions API takes it.")
]
TokensOption = Annotated[
    Path | None, typer.Option("--tokens", help="A file with the prompt's tokens, a JSON array.")
]
TokenizerOption = Annotated[
    str, typer.Option("--tokenizer", help="For --prompt: a model; else the identity's own.")
]


def groups_of(identity: Path, prompt: str, tokens: Path | None, tokenizer: str) -> list[Group]:
    """The chunks of a prompt in the files of an identity.

    Args:
        identity: its directory.
        prompt, tokens: the prompt, as text or as a file; exactly one.
        tokenizer: a model whose tokenizer reads the text; empty for the identity's.

    Raises:
        ConfigError: neither or both are given, or one of them cannot be read.
    """
    facts = key_facts(identity)
    if bool(prompt) == (tokens is not None):
        raise ConfigError("give the prompt either with --prompt or with --tokens")
    ids = _read(tokens) if tokens is not None else _tokenize(prompt, tokenizer or facts.model)
    return groups_of_tokens(facts, ids)


def _read(tokens: Path) -> list[int]:
    try:
        ids = msgspec.json.decode(tokens.read_bytes(), type=list[int])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--tokens is '{tokens}': must be a file with a JSON array of token ids ({error})"
        ) from None
    return ids


def _tokenize(prompt: str, model: str) -> list[int]:
    try:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(model)(prompt).input_ids
    except ImportError:
        raise ConfigError("--prompt needs transformers; --tokens does not") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer is '{model}': no tokenizer can be loaded from there ({error})"
        ) from None
    return [int(token) for token in ids]
