"""Generated English sentences, for models that predict the next character."""

from __future__ import annotations

import numpy as np

from ddlsim.arguments import Count, Seed, checked
from ddlsim.data.dataset import DataSet
from ddlsim.streams import stream

CHARACTERS = " .abcdefghijklmnopqrstuvwxyz"
_NOUNS = ("worker", "server", "switch", "cable", "gradient", "model", "packet", "engineer", "cat", "bird")
_ADJECTIVES = ("slow", "fast", "small", "large", "new", "old", "stale", "quiet")
_VERBS = ("wait", "send", "hold", "find", "lose", "move", "need", "see")
_ADVERBS = ("now", "again", "at night", "every day", "too late", "in time")
_TEXTS = 64  # sentences of one random stream: a text does not depend on how long it becomes


@checked
def sentences(n_samples: Count, length: Count = 32, seed: Seed = 0) -> DataSet:
    """Return `n_samples` pieces of `length` characters of a text, as ids (n_samples, length); labels, of the same
    shape, are the characters that follow.

    The text is made by a small grammar in which subject and verb agree: "the old worker sends two birds now. some cats
    wait again. ..." The most frequent character, the blank, is 18 % of it.
    """
    wanted = n_samples * length + 1
    part = 0
    pieces: list[str] = []
    size = 0
    while size < wanted:
        text = "".join(_sentence(draws) for draws in [stream(seed, part, "sentences")] for _ in range(_TEXTS))
        pieces.append(text)
        size += len(text)
        part += 1
    place = {character: i for i, character in enumerate(CHARACTERS)}
    ids = np.array([place[character] for character in "".join(pieces)[:wanted]], dtype=np.int64)
    shape = (n_samples, length)
    names = tuple(CHARACTERS)
    source = "generated: a grammar of simple English sentences"
    return DataSet("sentences", ids[:-1].reshape(shape).astype(np.float32), ids[1:].reshape(shape), names, source)


def _sentence(draws: np.random.Generator) -> str:
    """Return: subject verb [object] [adverb] full stop, blank."""
    choice = draws.random(8)
    several = choice[0] < 0.5
    verb = _one(_VERBS, choice[1]) + ("" if several else "s")
    words = [_phrase(choice[2:4], several=several), verb]
    if choice[4] < 0.7:
        words.append(_phrase(choice[5:7], several=choice[4] < 0.35))
    if choice[7] < 0.6:
        words.append(_one(_ADVERBS, choice[7] / 0.6))
    return " ".join(words) + ". "


def _phrase(choice: np.ndarray[tuple[int], np.dtype[np.float64]], *, several: bool) -> str:
    article, rest = _split(choice[0], ("some", "two", "the") if several else ("a", "one", "the"))
    noun, again = _split(choice[1], _NOUNS)
    adjective = f"{_one(_ADJECTIVES, again)} " if rest < 0.5 else ""
    if article == "a" and (adjective or noun)[0] in "aeiou":
        article = "an"
    return f"{article} {adjective}{noun}{_plural(noun) if several else ''}"


def _plural(noun: str) -> str:
    return "es" if noun.endswith("ch") else "s"


def _split(draw: float, words: tuple[str, ...]) -> tuple[str, float]:
    """Return a word, and what is left of the draw, from 0 to 1."""
    at = draw * len(words)
    return words[int(at)], at - int(at)


def _one(words: tuple[str, ...], draw: float) -> str:
    return words[min(int(draw * len(words)), len(words) - 1)]
