"""Scores of a text beside a reference: exact match, BLEU and ROUGE-L, by the packages that papers use."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from selfspec.errors import BenchError


@dataclass(frozen=True)
class TextScores:
    """A text beside a reference, each between 0 and 1.

    Attributes:
        exact: 1 where they are alike but for white space at their ends.
        bleu: sentence BLEU of sacrebleu, with the orders of n-grams that the text is long enough for.
        rouge_l: F-measure of rouge-score's ROUGE-L, without stemming.
    """

    exact: float
    bleu: float
    rouge_l: float


def require_packages() -> None:
    """Refuse before work starts what could not be scored."""
    missing = [name for name in ("sacrebleu", "rouge_score") if find_spec(name) is None]
    if missing:
        raise BenchError(f"--quality needs {' and '.join(missing)}; pip install 'selfspec[quality]'")


def score(text: str, reference: str) -> TextScores:
    """Score a text. Two texts without a word are alike."""
    import sacrebleu
    from rouge_score import rouge_scorer

    text, reference = text.strip(), reference.strip()
    if text == reference:
        return TextScores(1.0, 1.0, 1.0)
    # Scores of packages are of words, and may find none in signs alone.
    bleu = sacrebleu.sentence_bleu(text, [reference]).score / 100
    rouge = rouge_scorer.RougeScorer(["rougeL"]).score(reference, text)["rougeL"].fmeasure
    return TextScores(0.0, min(bleu, 1.0), float(rouge))
