"""Where words begin and end, for matching cues as whole words."""

from __future__ import annotations

import unicodedata

# Scripts that put no blanks between words: any place between two of their letters may be a word's
# edge. Ranges by the Unicode code charts.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # CJK extension A
    (0x4E00, 0x9FFF),  # CJK
    (0xF900, 0xFAFF),  # CJK compatibility
    (0x20000, 0x3FFFF),  # CJK extensions B and on
)


def is_word_char(char: str) -> bool:
    """Letters, digits, marks that combine with them, and the underscore."""
    return char.isalnum() or char == "_" or unicodedata.category(char)[0] == "M"


def joined(left: str, right: str) -> bool:
    """Whether two neighbouring characters are of one word; either may be '', a text's edge."""
    return bool(left and right) and _spaced_word_char(left) and _spaced_word_char(right)


def _spaced_word_char(char: str) -> bool:
    code = ord(char)
    return is_word_char(char) and not any(low <= code <= high for low, high in _UNSPACED)
