"""The shipped model's tokenizer as a folder that transformers reads, made from its GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

CONTROL = 3
"""What GGUF calls tokens that no text has."""


def make_tokenizer(folder: Path) -> Path:
    """Write it below `folder`, and say where."""
    reader = GGUFReader(os.environ["CLIENTS_GGUF"])

    def values(name: str) -> list:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, kinds = values("tokens"), values("token_type")
    merges = [tuple(each.split(" ", 1)) for each in values("merges")]
    made = Tokenizer(BPE({token: n for n, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = [
        AddedToken(t, special=True) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL
    ]
    made.add_special_tokens(special)
    place = folder / "tokenizer"
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    names = {
        name: tokens[int(reader.fields[f"tokenizer.ggml.{key}"].contents())]
        for name, key in {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}.items()
    }
    template = reader.fields["tokenizer.chat_template"].contents()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **names}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place
