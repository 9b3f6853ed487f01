"""The tokens of a model with a byte-level BPE vocabulary: from text, and to bytes."""

from __future__ import annotations

from typing import Any


class Vocabulary:
    """What the engine asks of llama.cpp's vocabulary."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self.size = int(vocabulary.n_vocab)
        self.end_ids = [each for each in range(self.size) if vocabulary.is_eog(each)]
        self.special_ids = [each for each in range(self.size) if vocabulary.is_control(each)]
        self.special_texts = [self.text(each) for each in self.special_ids]
        self._begin_ids = [int(vocabulary.token_bos())] if vocabulary.get_add_bos() else []
        self._specials = frozenset(self.special_ids)

    @property
    def bos_text(self) -> str:
        """What a chat template calls `bos_token`."""
        return self.text(self._vocabulary.token_bos())

    @property
    def eos_text(self) -> str:
        """What a chat template calls `eos_token`."""
        return self.text(self._vocabulary.token_eos())

    def text(self, token_id: int) -> str:
        """How the vocabulary writes a token: special ones as they stand in templates."""
        return str(self._vocabulary.get_text(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """From the vocabulary itself: llama.cpp's own pieces replace a split character."""
        if token_id in self._specials:
            return b""
        text = self.text(token_id)
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError:
            # A token added to the vocabulary as plain text.
            return text.encode()

    def all_bytes(self) -> list[bytes]:
        """Of every token; special ones as they are written."""
        return [
            self.text(each).encode() if each in self._specials else self.token_bytes(each)
            for each in range(self.size)
        ]

    def tokenize(self, text: str, *, is_template: bool) -> list[int]:
        """The tokens of `text`; a template writes its special tokens itself."""
        add_special, parse_special = False, is_template
        tokens = self._vocabulary.tokenize(text, add_special, parse_special)
        return [int(token_id) for token_id in tokens]

    def begin(self, tokens: list[int]) -> list[int]:
        """A prompt of these tokens, as the model was trained on the beginning of a text."""
        return self._begin_ids + tokens


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of all bytes in a byte-level BPE vocabulary (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
