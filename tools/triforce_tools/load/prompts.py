"""The texts of prompts: plain words in random order, so that any server can be asked and no cache knows them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from triforce_tools.load.workload import PlannedRequest

# Words that are one token each, or nearly, in most vocabularies.
TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""
WORDS = TEXT.split()
SENTENCE_WORDS = 16


def made_sentences(count: int) -> list[str]:
    """Sentences of `SENTENCE_WORDS` words, always the same ones."""
    chance = random.Random("sentences")
    return [" ".join(chance.choices(WORDS, k=SENTENCE_WORDS)) for _ in range(count)]


# Whole sentences are drawn, which takes a sixteenth of the time: the sender must not be busy when answers arrive.
SENTENCES = made_sentences(4096)

HEAD_WORDS = 8  # at the beginning of all prompts of a run
DOCUMENT_SHARE = 0.9  # of a prompt that begins with a common document; the rest is its own, such as a question


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a load. `tokens_per_word` is the server's own, since vocabularies differ. All prompts of a run
    begin with words that the text `run` chooses, so that a server that keeps KV finds none of an earlier run.
    """

    seed: int
    tokens_per_word: float = 1.0
    run: str = ""

    def text(self, request: PlannedRequest) -> str:
        """A prompt of about as many tokens as planned; it is the same whenever it is asked for."""
        words = max(1, round(request.input_tokens / self.tokens_per_word))
        head = min(HEAD_WORDS, words) if self.run else 0
        common = 0 if request.document is None else int(DOCUMENT_SHARE * (words - head))
        parts = (
            " ".join(random.Random(self.run).choices(WORDS, k=head)),
            words_of(f"{self.seed} document {request.document}", common),
            words_of(f"{self.seed} prompt {request.index}", words - head - common),
        )
        return " ".join(filter(None, parts))


def words_of(name: str, count: int) -> str:
    """The first `count` words of the endless text called `name`."""
    sentences = random.Random(name).choices(SENTENCES, k=math.ceil(count / SENTENCE_WORDS))
    if rest := count % SENTENCE_WORDS:
        sentences[-1] = " ".join(sentences[-1].split()[:rest])
    return " ".join(sentences)
