"""What kind of text is this: does it mean anything, in which language is it, and how much of it repeats?

A text means little where it is a list of unrelated words, or opaque: digits, identifiers, codes. Such text is
easy to generate and common in long-context tests, and unlike what users write. Three signs are read, each on
windows of about forty words: opaque strings (letters and digits mixed within a word, long numbers), word
lists (hardly any function words and no sentences), and repetition of what the same text said before.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

WINDOW = 40
"""Words, or characters of scripts without spaces."""
OPAQUE_SHARE = 0.4
"""Of a window's characters: more is opaque."""
FUNCTION_WORD_SHARE = 0.04
"""Of a window's words: natural text of every language here has several times as many."""
SHINGLE = 8
"""Words in a row that count as repeated when they occur again."""
LOW_MEANING = 0.4
"""A text of which this share has little meaning is flagged."""

# Words, single characters of Chinese, Japanese kana and Thai, and single signs.
_TOKENS = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|\w+(?:['’]\w+)?|[^\w\s]")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_SENTENCE_SIGNS = frozenset(".?!。?!…")
_CODE_SIGNS = frozenset("(){}[]=<>|;:+*/\\\"'`_#$%^&@~×")

_FUNCTION_WORD_LISTS = """
en the of and to in is was it that he she for on are as with his her they at be this from have or by had not
en but what all were when we there can an your which their if will do how them then these so some would no
en than who its you i a my me about into
de der die das und ist nicht ein eine zu den dem von mit auf für im es sich auch als an nach wie aus bei
fr le la les de des et est un une dans que qui pour pas sur avec il elle au aux du ce se ne en sont
es el la los las de y es un una en que por para con no se su al del lo como más pero sus le ha
it il lo la gli le di e è un una in che per con non si del della al sono da come più ma
pt o a os as de e é um uma em que por para com não se do da ao no na como mais mas
nl de het een en is van in dat niet te op met voor zijn aan er als ook maar om bij
pl i w na z się nie do to że jest o jak a po ale od za przez co tak
tr ve bir bu da de için ile çok ne gibi daha ama o mi var en
ru и в не на что с он как это я по но из у за к от же так все она был
"""


def _read_function_words() -> Mapping[str, frozenset[str]]:
    lists: dict[str, set[str]] = {}
    for language, *words in map(str.split, _FUNCTION_WORD_LISTS.strip().splitlines()):
        lists.setdefault(language, set()).update(words)
    return MappingProxyType({language: frozenset(words) for language, words in lists.items()})


_FUNCTION_WORDS = _read_function_words()
_ALL_FUNCTION_WORDS = frozenset().union(*_FUNCTION_WORDS.values())
_CHINESE_FUNCTION = frozenset(
    "的是了在不和有我他她它们这那也就都而及与着或被把从到对为以于中上下里吗呢吧很没要会能可说"
)
_SCRIPTS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "ja": re.compile(r"[\u3040-\u30ff]"),
        "zh": _HAN,
        "ko": re.compile(r"[\uac00-\ud7af\u1100-\u11ff]"),
        "cyrillic": re.compile(r"[\u0400-\u04ff]"),
        "arabic": re.compile(r"[\u0600-\u06ff]"),
        "hebrew": re.compile(r"[\u0590-\u05ff]"),
        "devanagari": re.compile(r"[\u0900-\u097f]"),
        "thai": re.compile(r"[\u0e00-\u0e7f]"),
        "greek": re.compile(r"[\u0370-\u03ff]"),
    }
)


@dataclass(frozen=True, slots=True)
class TextMeasures:
    """Shares from 0 to 1 of one text.

    low_meaning: share of its characters in windows that are opaque, lists of words or repetition; opaque,
    word_list and repetition are its parts. compression: bytes after zlib per byte before; long natural text
    is near 0.4, random digits near 0.5, endless repetition near 0. class_entropy: bits per character of the
    distribution of character classes. language: of most of the text.
    """

    characters: int
    words: int
    opaque: float
    word_list: float
    repetition: float
    compression: float
    class_entropy: float
    language: str

    @property
    def low_meaning(self) -> float:
        return min(1.0, self.opaque + self.word_list + self.repetition)


def tokenize_words(text: str) -> list[str]:
    """Words, single characters of scripts without spaces, and signs; a UUID is one word."""
    return _TOKENS.findall(_UUID.sub(lambda match: match[0].replace("-", ""), text))


def measure_text(text: str) -> TextMeasures:
    """Measure one text; see `TextMeasures`."""
    lines = [tokenize_words(line) for line in text.splitlines()]
    tokens = [token for line in lines for token in line]
    characters = Counter(text)
    repeated = _repeated(tokens)
    weights = Counter[str]()
    total = 0
    start = 0
    for length in _window_lengths(map(len, lines)):
        window = tokens[start : start + length]
        size = sum(map(len, window))
        total += size
        kind = _kind(window, repeated[start : start + length])
        if kind:
            weights[kind] += size
        start += length
    raw = text.encode("utf-8", errors="replace")
    return TextMeasures(
        characters=len(text),
        words=len(tokens),
        opaque=weights["opaque"] / max(total, 1),
        word_list=weights["word_list"] / max(total, 1),
        repetition=weights["repetition"] / max(total, 1),
        compression=len(zlib.compress(raw)) / max(len(raw), 1),
        class_entropy=_class_entropy(characters),
        language=_language(characters, tokens),
    )


def _language(characters: Mapping[str, int], tokens: Sequence[str]) -> str:
    """ISO 639-1 code, the name of a script, or "none": by script, then by the function words that occur."""
    letters = sum(count for character, count in characters.items() if character.isalpha())
    visible = sum(count for character, count in characters.items() if not character.isspace())
    if letters <= 0.3 * visible:
        return "none"
    for name, pattern in _SCRIPTS.items():
        share = sum(count for character, count in characters.items() if pattern.match(character)) / letters
        # Japanese mixes kana into Han characters; a little is enough.
        if share > (0.1 if name == "ja" else 0.3):
            return "ru" if name == "cyrillic" and _by_function_words(tokens) == "ru" else name
    return _by_function_words(tokens)


def _by_function_words(tokens: Sequence[str]) -> str:
    words = [token.lower() for token in tokens if token[0].isalpha()]
    hits = {language: sum(word in known for word in words) for language, known in _FUNCTION_WORDS.items()}
    best = max(hits, key=lambda language: hits[language])
    return best if hits[best] >= max(1, 0.05 * len(words)) else "none"


def _window_lengths(line_lengths: Iterable[int]) -> Iterator[int]:
    """Cut lines into windows. Short lines (code, tables) share one; a long one (a list) has its own."""
    short = 0
    for length in line_lengths:
        if length < WINDOW / 4:
            short += length
            if short >= WINDOW:
                yield short
                short = 0
            continue
        if short:
            yield short
            short = 0
        parts = max(1, round(length / WINDOW))
        yield from (length * (part + 1) // parts - length * part // parts for part in range(parts))
    if short:
        yield short


def _kind(window: Sequence[str], repeated: Sequence[bool]) -> str | None:
    """Why a window has little meaning; None if it has some."""
    size = sum(map(len, window))
    if sum(len(token) for token in window if _is_opaque(token)) > OPAQUE_SHARE * size:
        return "opaque"
    if 2 * sum(repeated) > len(window):
        return "repetition"
    words = [token for token in window if token[0].isalnum()]
    if len(words) < 8 or any(token in _SENTENCE_SIGNS for token in window[1:-1]):
        return None
    if sum(token in _CODE_SIGNS for token in window) > 0.08 * len(window):
        return None
    function = sum(word.lower() in _ALL_FUNCTION_WORDS or word in _CHINESE_FUNCTION for word in words)
    return "word_list" if function < FUNCTION_WORD_SHARE * len(words) else None


def _is_opaque(token: str) -> bool:
    """Long numbers, and words in which letters and digits mix (identifiers, hashes, codes)."""
    if not any(map(str.isdigit, token)):
        return False
    if token.isdigit():
        return len(token) >= 5
    letters = sum(map(str.isalpha, token))
    return letters > 0 and len(token) >= 3


def _repeated(tokens: Sequence[str]) -> list[bool]:
    """Whether each token lies in a run of SHINGLE tokens that occurred before in the same text."""
    marks = [False] * len(tokens)
    seen: set[int] = set()
    for start in range(len(tokens) - SHINGLE + 1):
        run = hash(tuple(tokens[start : start + SHINGLE]))
        if run in seen:
            marks[start : start + SHINGLE] = [True] * SHINGLE
        seen.add(run)
    return marks


def _class_entropy(characters: Mapping[str, int]) -> float:
    """Shannon entropy, in bits, of capital, small, other letter, digit, space and sign."""
    classes = Counter[str]()
    for character, count in characters.items():
        classes[_class(character)] += count
    total = sum(classes.values())
    return -sum(count / total * math.log2(count / total) for count in classes.values())


def _class(character: str) -> str:
    if character.isspace():
        return "space"
    if character.isdigit():
        return "digit"
    if not character.isalpha():
        return "sign"
    return "capital" if character.isupper() else "small" if character.islower() else "letter"
