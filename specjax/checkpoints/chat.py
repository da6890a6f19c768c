"""Chat templates: messages to prompt text, in a sandbox, since a template is code that came with a checkpoint."""

import datetime
import difflib
import functools
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

ROLES = ("system", "developer", "user", "assistant", "tool")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; the text inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (that is its type in jinja2)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form):
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """A compiled template with the functions and filters that templates of published models expect.

    Raises:
      ValueError: the template is not valid jinja2.

    Example:
      >>> compile_template("{{ messages[0]['content'] | tojson }}").render(messages=[{"content": "<b>"}])
      '"<b>"'
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template: line {error.lineno}: {error.message}") from None


def check_messages(messages: Sequence[Mapping]) -> None:
    """Raises a ValueError that names the message unless all have a known role and text.

    Templates print nothing for a role they do not know and an empty string for missing content, so neither would be noticed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages is {messages!r:.80}; it must be a non-empty list like [{{'role': 'user', 'content': 'Hello'}}]"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] is {message!r:.80}; it must be a dict with 'role' and 'content'")
        role = message.get("role")
        if role not in ROLES:
            close = difflib.get_close_matches(str(role), ROLES, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"messages[{index}]['role'] is {role!r}{hint}; it must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"messages[{index}]['content'] is {content!r:.80}; it must be a string")


def render(source: str, messages: Sequence[Mapping], add_generation_prompt: bool, special_tokens: Mapping[str, str]) -> str:
    """The prompt text.

    Args:
      source: the template.
      messages: dicts with ``role`` and ``content``.
      add_generation_prompt: whether to end with the opening of the assistant's turn.
      special_tokens: variables for the template, such as ``bos_token``.

    Raises:
      ValueError: malformed messages, or the template refuses them or fails.
    """
    check_messages(messages)
    template = compile_template(source)
    try:
        return template.render(
            messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **special_tokens
        )
    # A template is foreign code: any exception of its is a refusal of these messages.
    except Exception as error:
        raise ValueError(f"the model's chat template refuses these messages: {type(error).__name__}: {error}") from error
