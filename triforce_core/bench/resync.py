"""What resyncing does for the retrieval tier's acceptance: `python -m triforce_core.bench.resync`.

Between two snapshots the retrieval tier works on KV of its own for what was decoded since the first. With a resync the
target sends its exact KV for those tokens, every so many. The same prompts are decoded without and with it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from triforce_core.bench.prompts import held_out_tokens
from triforce_core.config import Settings, load_settings
from triforce_core.engine.assembly import load_local_engine, run_to_end
from triforce_core.engine.sequence import Output, Request
from triforce_core.messages import SamplingParams, Tally
from triforce_core.models.load import load_tokenizer


def measure(settings: Settings, requests: list[Request]) -> dict[str, Any]:
    """Decode each request alone; tokens, the target's acceptance of what retrieval proposed, tokens a target pass."""
    tally = Tally()
    tokens: list[tuple[int, ...]] = []
    for request in requests:
        outputs: list[Output] = list(run_to_end(load_local_engine(settings), [request]))
        tally += outputs[-1].stats.tallies[0]
        tokens.append(tuple(token for output in outputs for token in output.tokens))
    decoded = sum(map(len, tokens))
    return {
        "tokens": tokens,
        "acceptance": tally.acceptance,
        "proposed": tally.proposed,
        "tokens_per_round": decoded / tally.rounds if tally.rounds else None,
    }


def main(
    prompts: Annotated[int, typer.Option(min=1, help="held-out prompts")] = 2,
    context: Annotated[int, typer.Option(min=1, help="tokens of each")] = 4096,
    output: Annotated[int, typer.Option(min=1, help="tokens to decode after each")] = 128,
    refresh: Annotated[int, typer.Option(min=1, help="committed tokens between selections of chunks")] = 64,
    temperature: float = 0.0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Print the acceptance without resyncing and with a resync every 8, 16 and 32 tokens."""
    tokenizer = load_tokenizer("demo")
    texts = [tuple(held_out_tokens(tokenizer, context, first_file)) for first_file in range(prompts)]
    expected = None
    for resync_every in (None, 8, 16, 32):
        settings = load_settings(
            dtype="float32",
            max_sequences=1,
            target={"kv_pool_tokens": context + output},
            retrieval={"resync_every": resync_every, "refresh_every": refresh},
            threads={"decode": threads, "prefill": threads},
        )
        lookaheads = settings.speculation.effective
        sampling = SamplingParams(temperature)
        found = measure(settings, [Request(text, output, sampling, 0, lookaheads) for text in texts])
        expected = found["tokens"] if expected is None else expected
        assert found["tokens"] == expected, "what is sent to drafters changes no token"
        name = "off" if resync_every is None else f"every {resync_every}"
        judged = f"acceptance {found['acceptance']:.4f} of {found['proposed']} proposed"
        print(f"resync {name:8s} {judged}, {found['tokens_per_round']:.2f} tokens a round", flush=True)


if __name__ == "__main__":
    typer.run(main)
