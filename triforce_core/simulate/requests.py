"""Requests, their blocks, and the input of a pass. Tokens are counted only."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Request:
    """One request. `chance` decides which of its tokens are accepted, independently of other requests and the
    placement.
    """

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    chance: random.Random
    produced: int = 0
    unread: int = 0  # tokens that the target must prefill before it can decode
    block: Block | None = None  # the outstanding block
    first_token_s: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def finished(self) -> bool:
        return self.produced == self.output_tokens

    def new_block(self, asked_s: float) -> Block:
        """Start the request's next block, still empty."""
        self.block = Block(self, asked_s)
        return self.block

    def accepted(self, proposed: int, alpha: float) -> int:
        """Draw how many of the proposed tokens are accepted before the first that is not."""
        for count in range(proposed):
            if self.chance.random() >= alpha:
                return count
        return proposed


@dataclass(eq=False, slots=True)
class Block:
    """The tokens that the retrieval tier has so far for a request. An empty block makes the target decode one token."""

    request: Request
    asked_s: float
    tokens: int = 0  # a head start (`ahead`) begins at -1, since its first token only guesses the target's own
    drafted: int = 0  # by the draft tier, in the present round
    guessed: bool = False  # run-ahead guessed the target's answer to the previous block correctly
    ahead: bool = False  # drafted before the target asked: its first token guesses the target's own
    in_round: bool = False  # in a round of the draft and retrieval tiers
    void: bool = False  # replaced or dropped: stations ignore it


@dataclass(frozen=True, slots=True)
class Blocks:
    """The input of a draft or retrieval pass."""

    blocks: list[Block]

    @property
    def batch(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class Verification:
    """The input of a target pass: blocks, and prefill chunks as (request, tokens)."""

    blocks: list[Block]
    chunks: list[tuple[Request, int]]

    @property
    def batch(self) -> int:
        return len(self.blocks) + len(self.chunks)


def mean_context(blocks: list[Block]) -> float:
    return sum(block.request.context for block in blocks) / len(blocks)
