"""Log probabilities in the forms of OpenAI's and vLLM's APIs."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from deploy.parts import Part
from deploy.service import ServedModel
from triforce_core.detokenizer import Detokenizer, TokenText
from triforce_core.errors import InvalidValueError
from triforce_core.messages import TokenLogprobs


class TokenStrings:
    """What single tokens are called in answers: one string for each token id, wherever it stands."""

    def __init__(self) -> None:
        self.vocabulary: LLTokenizer | None = None

    async def load(self, model: ServedModel) -> None:
        """To be called before the first string is made. It takes a second for the largest vocabularies.

        Raises `InvalidValueError` for a tokenizer that llguidance cannot use.
        """
        if self.vocabulary is None:
            count = max(model.limits.vocab_size, len(model.tokenizer))
            try:
                self.vocabulary = await asyncio.to_thread(from_tokenizer, model.tokenizer, n_vocab=count)
            except ValueError as error:
                raise InvalidValueError(
                    "logprobs", True, f"need another tokenizer than this model's: {error}"
                ) from None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that this token writes, which may be a part of a character; of a special token, its name."""
        assert self.vocabulary is not None, "load() comes first"
        return self.vocabulary.decode_bytes([token])

    def __call__(self, token: int) -> str:
        """The token's text; as in OpenAI's API, `bytes:` and its bytes where they form no whole characters."""
        written = self.bytes_of(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


class CompletionLogprobs:
    """The logprobs of one choice in the form of OpenAI's completions API, as its tokens come."""

    def __init__(self, strings: TokenStrings, meaning: TokenText, num_top: int, *, resume: Sequence[int] = ()) -> None:
        """`resume`: tokens of the output that the client has already, with their text but for what they left open."""
        self.strings, self.meaning, self.num_top, self.resume = strings, meaning, num_top, resume
        self.detokenizer = Detokenizer(meaning)
        self.offset = 0  # characters that the tokens so far complete
        self.held = ""  # what follows them if no token changes it: bytes so far that form no character, or not yet
        self.echoed = 0  # characters of the text that are the prompt's
        self.in_output = False  # whether a token of the output came

    def of(self, part: Part, prompt: Sequence[int]) -> dict[str, list[Any]]:
        """The logprobs of a part's tokens. If the prompt is echoed, those of its tokens come first: `prompt` has the
        prompt tokens whose logprobs the part has. Otherwise `prompt` is empty.
        """
        self.echoed += part.echoed
        found = logprobs_fields()
        if part.echoed:
            # The echo is the text as the client sent it: special tokens that stand in it are text here.
            added = self.meaning.tokenizer.added_tokens_decoder.values()
            echo = part.piece.text[: part.echoed]
            self.detokenizer = Detokenizer(self.meaning.showing(each.content for each in added if each.content in echo))
        if prompt:
            self.extend(found, prompt, part.prompt_logprobs)
        if part.piece.tokens and not self.in_output:
            self.in_output, self.detokenizer, self.held = True, Detokenizer(self.meaning), ""
            for token in self.resume:
                self.place(token)
            self.offset = self.echoed
        self.extend(found, part.piece.tokens, part.piece.logprobs)
        return found

    def extend(self, found: dict[str, list[Any]], tokens: Sequence[int], scores: Sequence[TokenLogprobs]) -> None:
        for token, score in zip(tokens, scores, strict=True):
            found["tokens"].append(self.strings(token))
            found["token_logprobs"].append(score.logprob)
            found["top_logprobs"].append(self.top(token, score))
            found["text_offset"].append(self.place(token))

    def place(self, token: int) -> int:
        """Where in the text this token begins, which is the next. A token that goes on with a character begins where
        the character does; one after bytes that form none, behind the replacement characters that stand for them.
        """
        completed = self.detokenizer.push(token)
        place = self.offset + common_length(self.held, completed)
        self.offset += len(completed)
        self.held = self.detokenizer.held()
        return place

    def top(self, token: int, score: TokenLogprobs) -> dict[str, float] | None:
        """The most probable tokens and the token itself; None where nothing predicts it. Of equal texts, the best."""
        if score.logprob is None:
            return None
        top: dict[str, float] = {}
        for each, logprob in (*score.top[: self.num_top], (token, score.logprob)):
            top.setdefault(self.strings(each), logprob)
        return top


def common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def logprobs_fields() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def merged_logprobs(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """These logprobs, in order, as one."""
    return {name: [each for piece in pieces for each in piece[name]] for name in logprobs_fields()}


def prompt_logprobs(
    strings: TokenStrings, tokens: Sequence[int], scores: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """The prompt's logprobs in vLLM's form: for each token a mapping by token id, which holds the token itself and the
    most probable ones; None for the first token, which nothing predicts. `rank` is null outside the most probable ones.
    """
    found: list[dict[str, Any] | None] = []
    for token, score in zip(tokens, scores, strict=True):
        ranks = {each: rank for rank, (each, _) in enumerate(score.top, 1)}
        listed = {token: score.logprob} | dict(score.top[:num_top])
        entries = {
            str(each): {"logprob": logprob, "rank": ranks.get(each), "decoded_token": strings(each)}
            for each, logprob in listed.items()
        }
        found.append(None if score.logprob is None else entries)
    return found
