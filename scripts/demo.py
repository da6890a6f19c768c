#!/usr/bin/env python3
"""Answers a prompt with a real model, once without and once with speculative decoding, and compares the two.

    make demo [PROMPT='...']        (or: .venv/bin/python scripts/demo.py --help)

Drafts come from prompt lookup: the last words of the text are looked for earlier in it, and what followed there is proposed. So
it gains where an answer repeats its prompt or itself, as with the second built-in prompt, and can lose a little elsewhere.
"""

import argparse
import sys

from rich.console import Console

import specjax
from specjax.cli.report import print_comparison, print_header

console = Console(highlight=False)

ORDINARY = "Why is the sky blue? Explain it to a child."
REPEATING = """Repeat the following text word for word.

The lighthouse keeper climbed the ninety-nine steps at dusk, lit the lamp, and wrote one line into the log: "Wind from the west,
two fishing boats, no moon." At dawn the lighthouse keeper climbed the ninety-nine steps again, put out the lamp, and wrote one
line into the log: "Wind from the west, no fishing boats, rain." """


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", help="your own prompt instead of the two built-in ones")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()

    try:
        model = specjax.load_model(arguments.model)
        print_header(model, console)
        if arguments.prompt is None:
            answer(model, ORDINARY, arguments.max_tokens, "An ordinary prompt")
            answer(model, REPEATING, arguments.max_tokens, "A prompt whose answer repeats it")
        else:
            answer(model, arguments.prompt, arguments.max_tokens, "Your prompt")
    except (ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def answer(model, prompt, max_tokens, title):
    """Streams the answer without and with prompt lookup, then prints what that gained."""
    print(f"\n=== {title} ===\n{prompt.strip()}")
    messages = [{"role": "user", "content": prompt}]
    params = specjax.SamplingParams(temperature=0, max_tokens=max_tokens)
    completions = []
    for name, drafter in (("plain decoding", None), ("prompt lookup", specjax.drafters.prompt_lookup())):
        print(f"\n--- {name} ---")
        for piece in specjax.stream(model, messages, params, drafter=drafter):
            print(piece.text, end="", flush=True)
        print(flush=True)
        completions.append(piece.completion)
    print_comparison(*completions, console)


if __name__ == "__main__":
    sys.exit(main())
