"""What passes through the tiers: requests, their blocks, and what of both a pass takes. Tokens are counts only."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Request:
    """One request; `chance` decides what is accepted of it, whatever its batch-mates and the placement."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    chance: random.Random
    produced: int = 0
    unread: int = 0  # tokens that the target must prefill before it can decode
    block: Block | None = None  # the one outstanding
    first_token_s: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def finished(self) -> bool:
        return self.produced == self.output_tokens

    def new_block(self, asked_s: float) -> Block:
        """Its next one, still empty."""
        self.block = Block(self, asked_s)
        return self.block

    def accepted(self, proposed: int, alpha: float) -> int:
        """How many of the proposed tokens are, up to the first that is not."""
        for count in range(proposed):
            if self.chance.random() >= alpha:
                return count
        return proposed


@dataclass(eq=False, slots=True)
class Block:
    """What the retrieval tier has so far for a request; sent up empty, it is one plain decoding step."""

    request: Request
    asked_s: float
    tokens: int = 0
    drafted: int = 0  # by the draft tier, in the round that runs
    guessed: bool = False  # run-ahead guessed right what the target made of the block before this one
    ahead: bool = False  # nobody has asked for it yet: its first token is the guess of the target's own
    in_round: bool = False  # on its way through draft and retrieval
    void: bool = False  # replaced: whoever meets it drops it


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a draft or a retrieval pass takes."""

    blocks: list[Block]

    @property
    def batch(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class Verification:
    """What a target pass takes: blocks, and tokens of prompts beside them."""

    blocks: list[Block]
    chunks: list[tuple[Request, int]]

    @property
    def batch(self) -> int:
        return len(self.blocks) + len(self.chunks)


def mean_context(blocks: list[Block]) -> float:
    return sum(block.request.context for block in blocks) / len(blocks)
