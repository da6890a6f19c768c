#!/usr/bin/env python3
"""Answers a prompt with a real model, once without and once with speculative decoding, and compares the two.

    make demo [PROMPT='...']        (or: .venv/bin/python scripts/demo.py --help)

Drafts come from prompt lookup: the last words of the text are looked for earlier in it, and what followed there is proposed. So
it gains where an answer repeats its prompt or itself, as with the second built-in prompt. Where it finds nothing, a trained head
drafts, if verify passes are cheap enough on this machine for that to pay; what was chosen is said, and why.
"""

import argparse
import sys

from specjax.user_cache import keep_programs

keep_programs()  # for JAX, which is imported now

from rich.console import Console  # noqa: E402

import specjax  # noqa: E402
from specjax.checkpoints.download import DownloadError  # noqa: E402
from specjax.checkpoints.heads import heads_of  # noqa: E402
from specjax.cli.report import print_comparison, print_header, print_text  # noqa: E402
from specjax.decoding import propose_seconds  # noqa: E402
from specjax.decoding.auto import choose_drafter, measure_costs  # noqa: E402
from specjax.drafters.base import sources_of  # noqa: E402

console = Console(highlight=False)

ORDINARY = "Why is the sky blue? Explain it to a child."
REPEATING = """Correct the spelling in this text and write the whole text again.

The old harbor master kept two books. In one he wrote every ship that came in, with its captain and its cargo. In the other he
wrote the weather, the price of rope, and what the gulls were doing. When he retired, the town found that only the second book was
useful."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", help="your own prompt instead of the two built-in ones")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()

    try:
        (arguments.prompt or "").encode()  # bytes that are no UTF-8 come from the shell as lone surrogates
        model = specjax.load_model(arguments.model)
        print_header(model, console)
        heads = heads_of(model)
        drafter, reason = choose_drafter(model, heads, measure_costs(model) if heads else None)
        console.print(f"Drafter {drafter.name}: {reason}.", markup=False)
        if arguments.prompt is None:
            answer(model, drafter, ORDINARY, arguments.max_tokens, "An ordinary prompt")
            answer(model, drafter, REPEATING, arguments.max_tokens, "A prompt whose answer repeats it")
        else:
            answer(model, drafter, arguments.prompt, arguments.max_tokens, "Your prompt")
    except (ValueError, OSError, DownloadError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def answer(model, drafter, prompt, max_tokens, title):
    """Streams the answer without and with speculation, then prints what that gained."""
    print(f"\n=== {title} ===\n{prompt.strip()}")
    messages = [{"role": "user", "content": prompt}]
    params = specjax.SamplingParams(temperature=0, max_tokens=max_tokens)
    completions = []
    for name, used in (("plain decoding", None), (f"speculative decoding with {drafter.name}", drafter)):
        print(f"\n--- {name} ---")
        # As `specjax generate` does: every round drafts only as deep as pays.
        pieces = specjax.stream(model, messages, params, drafter=used, adaptive=used is not None)
        completions.append(print_text(pieces, console))
    tree = drafter.functions.tree
    # The published formula is for chains of one length; a stack drafts by turns.
    length = tree.num_nodes if tree.is_chain and not sources_of(drafter.functions) else 0
    print_comparison(*completions, length, propose_seconds(model, messages, params, drafter), console)


if __name__ == "__main__":
    sys.exit(main())
