"""``specjax generate``: one prompt, answered as text or as JSON."""

import json
import sys
from typing import Annotated

import typer

from specjax.cli import options
from specjax.cli.drafters import check_drafter, make_drafter, parse_drafter


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt; without it, standard input is read.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, also with a chat model.")] = False,
    model: options.Model = "smollm2-135m-instruct",
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    drafter: options.DrafterName = "auto",
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    adaptive: options.Adaptive = None,
    rule: options.Rule = "auto",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    min_tokens: options.MinTokens = 0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    n: options.NumCompletions = 1,
    allow_lossy: options.AllowLossy = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
):
    """Answer a prompt; the text goes to standard output, everything else to standard error.

    A model with a chat template gets the prompt as a user's turn, unless --raw is given. One newline at the end of standard
    input is dropped.
    """
    if context.args:
        extra = context.args[0]
        raise options.CallError(
            options.suggestion(extra) or f"unexpected argument {extra!r}; the prompt is given by --prompt TEXT"
        )
    parts = parse_drafter(drafter, num_speculative_tokens)
    for name, asked in (("--logprobs", logprobs is not None), ("--n", n != 1)):
        if asked and not as_json:
            raise options.CallError(f"{name} needs --json: text alone has no place for it")
    text = read_prompt(prompt)

    import specjax
    from specjax.cli.report import print_header, print_statistics, print_text

    try:
        params = options.sampling_params(context)
        # All that is wrong with the call is said before a model is loaded, or downloaded.
        check_drafter(parts, num_speculative_tokens, rule, params.greedy, allow_lossy)
    except ValueError as error:
        raise options.CallError(str(error)) from error

    target = specjax.load_model(model, revision=revision, dtype=dtype)
    made = make_drafter(parts, num_speculative_tokens, dtype, target, rule)
    question = text if raw or not has_chat_template(target) else [{"role": "user", "content": text}]
    adaptive = drafter == "auto" if adaptive is None else adaptive
    run = {"drafter": made, "rule": rule, "allow_lossy": allow_lossy, "adaptive": adaptive}

    print_header(target)
    if as_json:
        documents = [to_document(completion) for completion in specjax.generate(target, [question], params, **run)]
        print(json.dumps(documents if n > 1 else documents[0]))
        return
    print_statistics(print_text(specjax.stream(target, question, params, **run)))


def to_document(completion) -> dict:
    """A completion as JSON has it; ``logprobs`` only where they were asked for, their token ids as strings."""
    document = {
        "text": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "stats": completion.stats.to_dict(),
    }
    return document if completion.logprobs is None else document | {"logprobs": completion.logprobs}


def read_prompt(prompt: str | None) -> str:
    """The prompt, from its option or from standard input.

    Raises:
      options.CallError: there is none, or it is not UTF-8.
    """
    try:
        if prompt is not None:
            prompt.encode()  # bytes that are no UTF-8 come from the shell as lone surrogates
            return prompt
        if sys.stdin is None or sys.stdin.isatty():
            raise options.CallError("no prompt: give --prompt TEXT, or text on standard input")
        text = sys.stdin.buffer.read().decode()
    except UnicodeError as error:
        raise options.CallError(f"the prompt is not UTF-8: {error}") from error
    if not text:
        raise options.CallError("no prompt: standard input is empty, and there is no --prompt TEXT")
    return text.removesuffix("\n")


def has_chat_template(model) -> bool:
    """Whether a prompt to this model is a user's turn by default."""
    return bool(getattr(model.tokenizer, "chat_template", None))
