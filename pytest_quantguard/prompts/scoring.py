"""How much of a right answer is in what a model wrote.

Three rules: one letter (`mcq`), any of the accepted answers (`qa`, `niah`, `lcx` and every unknown task), the
share of the wanted words (`cwe`, `fwe`). All look at what follows the reasoning, compare without regard to
case, width and typography, and never match inside a longer word or number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

Scorer = Callable[[str, Sequence[str]], float]
"""(answer, gold) -> score from 0 to 1."""


def score(task: str, answer: str, gold: Sequence[str]) -> float:
    """The score of an answer, 0 to 1, by the rule of its task. Raises ValueError for gold that nothing can
    meet.
    """
    check_gold(task, gold)
    return SCORERS.get(task, score_any)(answer, gold)


def check_gold(task: str, gold: Sequence[str]) -> None:
    """Raise ValueError where no answer whatever could score: no gold, signs only, for mcq no letter."""
    if not gold:
        raise ValueError("there is no gold answer")
    for answer in gold:
        if task == "mcq" and not re.fullmatch(rf"[{LETTERS}]", answer.strip(), re.IGNORECASE):
            raise ValueError(f"the gold answer of an mcq must be one letter from A to J, not {answer!r}")
        if not normalize(answer):
            raise ValueError(f"the gold answer {answer!r} holds nothing that could be compared")


def strip_reasoning(answer: str) -> str:
    """What follows the last `</think>`; what precedes `<think>`, where reasoning began and never ended."""
    tail = re.split(r"</think(?:ing)?>", answer, flags=re.IGNORECASE)[-1]
    return re.split(r"<think(?:ing)?>", tail, maxsplit=1, flags=re.IGNORECASE)[0]


# --- one letter ---

LETTERS = "A-J"

# A capital stands for an option, unless it is the pronoun; a small letter only where nothing follows it,
# since it may be an article. "A or B" is no choice.
_LETTER = (
    rf"\(?(?-i:(?P<capital>[{LETTERS}])(?!(?<=I)\s[a-z])|(?P<small>[{LETTERS.lower()}])(?=\)|[.,;]?\s*(?:\n|$)))"
    r"(?![A-Za-z0-9'’])(?!\)?\s*(?:,|、|/|&|\bor\b|\band\b|或|和)\s*\(?[A-Ja-j]\b)"
)
_SAID = re.compile(
    rf"""(?:
        \banswer\b(?:[^.\n:]{{0,60}}?\b(?:is|be)\b|\s+is)?\s*[:=]?
      | \b(?:correct|right|best)\s+(?:option|choice|letter)\b(?:[^.\n:]{{0,60}}?\b(?:is|be)\b)?\s*[:=]?
      | \b(?:choose|pick|select|go\s+with|it\s+is|it's|it’s)\b
      | (?:答案|正确选项|正确的选项|应选|故选|我选|选择|选)(?:应该|应)?\s*[是为]?\s*[::]?
    )
    \s*(?:the\s+)?(?:option|choice|letter|选项)?\s*[:：]?\s*{_LETTER}""",
    re.IGNORECASE | re.VERBOSE,
)
_CALLED_RIGHT = re.compile(
    rf"\b(?:option\s+)?\(?(?P<capital>[{LETTERS}])\)?\s+is\s+(?:the\s+)?(?:correct|right)\b"
    rf"|(?P<chinese>[{LETTERS}])\s*(?:选项)?\s*(?:是|为)?\s*(?:正确|对)的?"
)
_ALONE = re.compile(rf"^\(?(?P<letter>[{LETTERS}{LETTERS.lower()}])(?:[).:]|\s*$|\s+[-–—]\s)", re.MULTILINE)


def score_letter(answer: str, gold: Sequence[str]) -> float:
    """1 if the option that the answer settles on is the gold letter.

    Understood are `ANSWER: B`, `\\boxed{B}`, "the correct option is (B)", "答案是B", a lone letter at the
    beginning or on the last line, and their variants; the last one counts.
    """
    return float(chosen_letter(answer) in {letter.strip().upper() for letter in gold})


def chosen_letter(answer: str) -> str | None:
    """The option (A to J) that an answer settles on; None if it settles on none."""
    text = _plain(strip_reasoning(answer))
    matches = sorted([*_SAID.finditer(text), *_CALLED_RIGHT.finditer(text)], key=lambda match: match.end())
    if matches:
        return next(group for group in matches[-1].groups() if group).upper()
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return None
    alone = _ALONE.match(lines[0]) or re.fullmatch(rf"\(?(?P<letter>[{LETTERS}])\)?\.?", lines[-1])
    return alone["letter"].upper() if alone else None


def _plain(text: str) -> str:
    """Text without Markdown, LaTeX and full-width forms; `\\boxed{x}` reads as a stated answer."""
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\\boxed\s*\{", " ANSWER: {", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{", "{", text)
    return re.sub(
        r"[*_`${}\"“”\[\]【】]|</?(?:answer|b|strong)>",
        lambda m: "answer: " if m[0] == "<answer>" else "",
        text,
    )


# --- accepted answers and wanted words ---


def score_any(answer: str, gold: Sequence[str]) -> float:
    """1 if any of the accepted answers occurs in the answer as a whole word or phrase."""
    text = normalize(strip_reasoning(answer))
    return float(any(contains(text, normalize(accepted)) for accepted in gold))


def score_share(answer: str, gold: Sequence[str]) -> float:
    """The share of the wanted words that occur in the answer as whole words."""
    text = normalize(strip_reasoning(answer))
    wanted = {normalize(word) for word in gold}
    return sum(contains(text, word) for word in wanted) / len(wanted)


def normalize(text: str) -> str:
    """Small letters, NFKC, signs as single spaces; but points within and minus before a number stay."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = re.sub(r"[\x00\x01]", " ", text)
    text = re.sub(r"[’'`´](?!s\b)", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<![\w])[-−–](?=\d)", "\x00", text)
    text = re.sub(r"(?<=\d)\.(?=\d)", "\x01", text)
    text = "".join(character if character.isalnum() or character in "\x00\x01" else " " for character in text)
    return " ".join(text.split()).replace("\x00", "-").replace("\x01", ".")


def contains(text: str, wanted: str) -> bool:
    """Does normalized `text` hold normalized `wanted`, not as a part of a longer word or number?"""
    start = text.find(wanted)
    while wanted and start >= 0:
        end = start + len(wanted)
        before, after = text[:start][-2:], text[end : end + 2]
        if not (
            _joined(before[-1:], wanted[:1])
            or _joined(wanted[-1:], after[:1])
            or _in_number(before, after, wanted)
        ):
            return True
        start = text.find(wanted, start + 1)
    return False


def _joined(left: str, right: str) -> bool:
    """Do two neighbouring characters belong to one word? Scripts without spaces have no word ends to look
    for.
    """
    return left.isalnum() and right.isalnum() and not _UNSPACED.match(left) and not _UNSPACED.match(right)


def _in_number(before: str, after: str, wanted: str) -> bool:
    """Does a minus or a decimal part make another number of the wanted one?"""
    starts, ends = wanted[0].isdigit(), wanted[-1].isdigit()
    return (starts and before[-1:] in ("-", ".")) or (ends and after[:1] == "." and after[1:].isdigit())


_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)

SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {"mcq": score_letter, "qa": score_any, "niah": score_any, "cwe": score_share, "fwe": score_share}
)
"""Tasks that are not named here are scored by `score_any`."""
