"""Lines of a batch file: what is asked in them, and what is answered.

Two forms, which may be mixed. The plain one is a prompt with sampling fields, named as in :class:`specjax.SamplingParams`::

    {"prompt": "Once", "max_tokens": 20, "id": "a"}      {"messages": [{"role": "user", "content": "Hello"}]}

The other is that of the OpenAI batch interface: ``custom_id``, ``method``, ``url``, ``body``; it is answered in its own form.
Every answer tells the number of its line, so that a job that was interrupted knows what it has.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from specjax.decoding.completions import Completion
from specjax.sampling.params import MAX_SEED, SamplingParams
from specjax.serving.requests import Request

OPENAI_ID = "batch_req_"
"""Before the line's number in answers of the OpenAI form."""

SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))

URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""What the OpenAI form may ask for, and the field that holds the prompt."""

SAME_NAME = ("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
"""Fields of an OpenAI body that mean what :class:`SamplingParams` means by them."""

ALSO_SAME = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output")
"""Fields that servers for open models take beside them."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One line of the input.

    Attributes:
      line: its number, from 1.
      name: its ``id`` or ``custom_id``; None where it has none.
      openai_url: what a line of the OpenAI form asks for; None for the plain form.
      request: what to submit, with the line's number as its id; None where the line is wrong.
      error: what is wrong with it.
    """

    line: int
    name: Any = None
    openai_url: str | None = None
    request: Request | None = None
    error: str | None = None


class WrongLine(ValueError):
    """A line that cannot be answered; the message says why."""


def read_line(
    data: bytes, line: int, defaults: SamplingParams, model_name: str, chat: bool = True, duplicate_of: int | None = None
) -> Asked:
    """What a line asks for; a wrong line is an :class:`Asked` with an error.

    Args:
      data: the line.
      line: its number, from 1.
      defaults: settings where the line says nothing. A default seed is that of line 0; each line takes its own.
      model_name: the model that answers.
      chat: whether a prompt that is text goes through the chat template as a user's turn (plain form).
      duplicate_of: an earlier line of the same id.

    Example:
      >>> asked = read_line(b'{"prompt": "Once", "max_tokens": 3}', 7, SamplingParams(), "m", chat=False)
      >>> asked.request.prompt, asked.request.params.max_tokens
      ('Once', 3)
      >>> read_line(b'{"prompt": "Once"', 7, SamplingParams(), "m").error
      "line 7 is not JSON: Expecting ',' delimiter: line 1 column 18 (char 17)"
    """
    name = url = None
    try:
        fields = parse(data, line)
        name = name_of(fields)
        if is_openai(fields):
            url = str(fields.get("url"))
        if name is not None and not isinstance(name, str | int):
            raise WrongLine(f"line {line}: the id is {name!r:.100}; it must be a string or a whole number")
        if duplicate_of is not None:
            raise WrongLine(f"line {line}: the id {name!r} is that of line {duplicate_of} too")
        if defaults.seed is not None:
            defaults = dataclasses.replace(defaults, seed=(defaults.seed + line) & MAX_SEED)
        if url is None:
            prompt, settings = _plain(fields, line, defaults, chat)
        else:
            prompt, settings = _openai(fields, line, defaults, model_name)
        return Asked(line, name, url, Request(prompt, settings, id=line))
    except WrongLine as error:
        return Asked(line, name, url, error=str(error))


def parse(data: bytes, line: int) -> dict:
    """The fields of a line.

    Raises:
      WrongLine: it is no JSON object.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WrongLine(f"line {line} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise WrongLine(f"line {line} is a JSON {type(fields).__name__}; it must be an object")
    return fields


def name_of(fields: dict) -> Any:
    """The ``id`` or ``custom_id`` of a line."""
    return fields.get("custom_id", fields.get("id"))


def is_openai(fields: dict) -> bool:
    """Whether these are fields of the OpenAI form."""
    return "body" in fields or "url" in fields


def _plain(fields, line, defaults, chat):
    known = SAMPLING_FIELDS | {"prompt", "messages", "id", "custom_id"}
    _no_others(fields, known, f"line {line}")
    if ("prompt" in fields) == ("messages" in fields):
        raise WrongLine(f"line {line} has {'both' if 'prompt' in fields else 'neither'} of prompt and messages; give one of them")
    prompt = fields["messages"] if "messages" in fields else fields["prompt"]
    if chat and "prompt" in fields and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    given = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    return _checked_prompt(prompt, line), _settings(defaults, given, line)


def _openai(fields, line, defaults, model_name):
    _no_others(fields, {"custom_id", "id", "method", "url", "body"}, f"line {line}")
    if not isinstance(fields.get("custom_id"), str):
        raise WrongLine(f"line {line}: custom_id is {fields.get('custom_id')!r:.100}; it must be a string")
    if fields.get("method", "POST") != "POST":
        raise WrongLine(f"line {line}: method is {fields['method']!r:.100}; it must be POST")
    url, body = fields.get("url"), fields.get("body")
    if url not in URLS:
        raise WrongLine(f"line {line}: url is {url!r:.100}; it must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise WrongLine(f"line {line}: body is {body!r:.100}; it must be an object")
    chat, holder, where = url.startswith("/v1/chat"), URLS[url], f"line {line}: body"
    lengths = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    counts = ("logprobs", "top_logprobs") if chat else ("logprobs",)
    neutral = ("user", "metadata", "stream", "store", "response_format")
    _no_others(body, {holder, "model", *SAME_NAME, *ALSO_SAME, *lengths, *counts, *neutral}, where)
    if body.get("model", model_name) != model_name:
        raise WrongLine(f"{where}: model is {body['model']!r:.100}; this job runs {model_name!r}")
    if body.get("stream"):
        raise WrongLine(f"{where}: stream is {body['stream']!r}; a batch has no streams")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise WrongLine(f"{where}: response_format is {body['response_format']!r:.100}; only text is supported")
    if holder not in body:
        raise WrongLine(f"{where} has no {holder}")
    # A field that is null is one that was left out.
    given = {name: body[name] for name in (*SAME_NAME, *ALSO_SAME) if body.get(name) is not None}
    for name in reversed(lengths):
        if body.get(name) is not None:
            given["max_tokens"] = body[name]
    if isinstance(given.get("logit_bias"), dict):
        given["logit_bias"] = {_token(token, where): bias for token, bias in given["logit_bias"].items()}
    asked = body.get("logprobs")
    if chat and asked:
        given["logprobs"] = body.get("top_logprobs") or 0
    elif chat and body.get("top_logprobs"):
        raise WrongLine(f"{where}: top_logprobs is {body['top_logprobs']!r} without logprobs")
    elif asked is not None and asked is not False:
        given["logprobs"] = asked
    return _checked_prompt(body[holder], line), _settings(defaults, given, line)


def _no_others(fields, known, where):
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise WrongLine(f"{where} has {unknown[0]!r}, which means nothing here; known are {', '.join(sorted(known))}")


def _token(text, where):
    try:
        return int(text)
    except ValueError:
        raise WrongLine(f"{where}: logit_bias holds {text!r}; keys must be token ids") from None


def _checked_prompt(prompt, line):
    if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, str) and all(isinstance(m, dict) for m in prompt):
        for message in prompt:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise WrongLine(f"line {line}: a message is {message!r:.100}; it must have a role and a content, both text")
    return prompt


def _settings(defaults, given, line):
    try:
        # JSON has lists where a default may be a tuple.
        return dataclasses.replace(defaults, **given)
    except (ValueError, TypeError) as error:
        raise WrongLine(f"line {line}: {error}") from error


def answer(asked: Asked, completions: Sequence[Completion], num_prompt_tokens: int, model, now: float | None = None) -> dict:
    """The record of an answered line.

    Args:
      asked: the line.
      completions: its completions.
      num_prompt_tokens: of its prompt.
      model: the model that answered.
      now: when, seconds since 1970; None is now.
    """
    if asked.openai_url is None:
        each = [_plain_completion(completion) for completion in completions]
        record = {"line": asked.line} | ({} if asked.name is None else {"id": asked.name})
        return record | (each[0] if len(each) == 1 else {"completions": each}) | {"num_prompt_tokens": num_prompt_tokens}
    broken = next((c for c in completions if c.finish_reason == "nan"), None)
    if broken is not None:
        return failure(
            dataclasses.replace(asked, error=f"the model's output was not a number after {len(broken.token_ids)} tokens")
        )
    chat = asked.openai_url.startswith("/v1/chat")
    num_tokens = sum(len(c.token_ids) for c in completions)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{asked.line}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time() if now is None else now),
        "model": model.name,
        "choices": [_choice(completion, chat, model) for completion in completions],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        },
    }
    return _openai_record(asked, 200, body)


def failure(asked: Asked) -> dict:
    """The record of a line that could not be answered."""
    if asked.openai_url is None:
        return {"line": asked.line} | ({} if asked.name is None else {"id": asked.name}) | {"error": asked.error}
    return _openai_record(asked, 400, {"error": {"message": asked.error, "type": "invalid_request_error"}})


def line_of(record: Any) -> int | None:
    """The number of the line that a record answers; None if it is no record of a batch job.

    Example:
      >>> line_of({"line": 3, "text": ""}), line_of({"id": "batch_req_12", "custom_id": "a"}), line_of({"id": 3})
      (3, 12, None)
    """
    if not isinstance(record, dict):
        return None
    line, name = record.get("line"), record.get("id")
    if line is None and "custom_id" in record and isinstance(name, str) and name.startswith(OPENAI_ID):
        number = name.removeprefix(OPENAI_ID)
        line = int(number) if number.isdecimal() else None
    return line if isinstance(line, int) and not isinstance(line, bool) and line >= 1 else None


def failed(record: dict) -> bool:
    """Whether a record is that of a line that could not be answered."""
    return record.get("error") is not None or (record.get("response") or {}).get("status_code", 200) != 200


def _openai_record(asked, status, body):
    response = {"status_code": status, "request_id": f"line-{asked.line}", "body": body}
    return {"id": f"{OPENAI_ID}{asked.line}", "custom_id": asked.name, "response": response, "error": None}


def _plain_completion(completion):
    stats = completion.stats
    record = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
    }
    return record if completion.logprobs is None else record | {"logprobs": completion.logprobs}


def _choice(completion, chat, model):
    choice = {"index": completion.index, "finish_reason": completion.finish_reason, "logprobs": None}
    if completion.logprobs is not None:
        choice["logprobs"] = _logprobs(completion, chat, model)
    if chat:
        return choice | {"message": {"role": "assistant", "content": completion.text}}
    return choice | {"text": completion.text}


def _logprobs(completion, chat, model):
    def entry(token, value):
        text = model.tokenizer.decode([token])
        return {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode())}

    rows = [list(row.items()) for row in completion.logprobs]
    if chat:
        return {"content": [entry(*row[0]) | {"top_logprobs": [entry(*item) for item in row[1:]]} for row in rows]}
    return {
        "tokens": [model.tokenizer.decode([row[0][0]]) for row in rows],
        "token_logprobs": [row[0][1] for row in rows],
        "top_logprobs": [{model.tokenizer.decode([token]): value for token, value in row[1:]} for row in rows],
    }
