"""Every message that docs/errors.md quotes is one that the code prints.

Many are raised here. Of the others, whose cause is costly to make, the text must be that of one string in the sources: a
placeholder in the page stands where the string is filled in, and what is between placeholders stands in it letter by letter.
"""

import ast
import functools
import json
import re
from pathlib import Path

import pytest

import specjax
from specjax.certificates.tiny import table_model
from specjax.checkpoints.cards import find_card
from specjax.checkpoints.download import _reason
from specjax.cli.drafters import parse_drafter
from specjax.cli.options import join_arguments
from specjax.drafters import PromptLookup, draft_model, prompt_lookup, stacked
from specjax.parallel import make_mesh, parse_mesh
from specjax.serving.batch_lines import read_line
from specjax.tree import DraftTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="tests of a source checkout")

PLACEHOLDER = re.compile(r"<[\w ]+>")
SHORTEST = 8
"""Letters between two placeholders that are looked for."""


@functools.cache
def quoted() -> tuple[str, ...]:
    """The first cell of every row of the page's tables, without its quotes."""
    rows = re.findall(r"^\| (?:`` ?(.+?) ?``|`([^`]+)`) \|", PAGE.read_text(), re.MULTILINE)
    return tuple(double or single for double, single in rows)


@functools.cache
def templates() -> tuple[tuple[str, ...], ...]:
    """Every string of the sources, split where it is filled in."""
    found = set()
    for path in (*(ROOT / "specjax").rglob("*.py"), *(ROOT / "scripts").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.add(tuple("".join(parts).split("\0")))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add((node.value,))
    return tuple(found)


def stands_in_the_sources(message: str) -> bool:
    """Whether a string of the sources makes this message."""
    fixed = [text for text in PLACEHOLDER.split(message) if len(text.strip()) >= SHORTEST]
    if not all(any(text in part for parts in templates() for part in parts) for text in fixed):
        return False
    # Most are not worth a regular expression.
    usable = (parts for parts in templates() if sum(map(len, parts)) >= SHORTEST and all(part in message for part in parts))
    return any(re.fullmatch(".+?".join(map(re.escape, parts)), message) for parts in usable)


def matches(message: str, raised: str) -> bool:
    """Whether ``raised`` is ``message`` with its placeholders filled in; a value may have lines."""
    return re.fullmatch(".+?".join(map(re.escape, PLACEHOLDER.split(message))), raised, re.DOTALL) is not None


TINY = table_model(vocab_size=5, seed=0)
TREE = DraftTree((-1, 0, 0))


def generate(prompts=([1, 2],), drafter=None, model=TINY, rule="auto", **params):
    """``specjax.generate`` with these settings."""
    return specjax.generate(model, prompts, specjax.SamplingParams(**params), drafter, rule)


def engine(**settings):
    """An engine of two slots."""
    return specjax.Engine(TINY, slots=2, capacity=16, **settings)


def submitted(*requests, **settings):
    """Requests to an engine of two slots, which is never asked to do anything."""
    with engine(**settings) as running:
        for request in requests:
            running.submit(request)


def closed():
    """An engine that is used too late."""
    with engine() as running:
        pass
    running.submit(specjax.Request([1]))


def line(text: str):
    """What is wrong with a line of a batch file."""
    asked = read_line(text.encode(), 3, specjax.SamplingParams(), "tiny", chat=False, duplicate_of=None)
    raise ValueError(asked.error)


def request(prompt=(1, 2), id=None, **params):
    """A request of at most four tokens."""
    return specjax.Request(list(prompt), specjax.SamplingParams(**{"max_tokens": 4} | params), id=id)


RAISED = {
    "no model": lambda: specjax.generate("smollm2-135m-instruct", ["a"]),
    "no list": lambda: generate(prompts=7),
    "no prompt": lambda: generate(prompts=[]),
    "ids without a list": lambda: generate(prompts=[1, 2]),
    "text without tokenizer": lambda: generate(prompts=["a"]),
    "an id too large": lambda: generate(prompts=[[5]]),
    "an empty prompt": lambda: generate(prompts=[[]]),
    "a long prompt": lambda: generate(prompts=[[1] * 64]),
    "settings for others": lambda: specjax.generate(TINY, [[1]], [specjax.SamplingParams()] * 2),
    "top_p": lambda: generate(top_p=1.5),
    "a stop id too large": lambda: generate(stop_token_ids=[9]),
    "stop strings without text": lambda: generate(stop="x"),
    "a stream of several": lambda: specjax.stream(TINY, [1], specjax.SamplingParams(n=2)),
    "a processor that looks": lambda: specjax.generate(TINY, [[1]], logits_processor=lambda a, b, c, d: d if c > 1 else -d),
    "a processor that cuts": lambda: specjax.generate(TINY, [[1]], logits_processor=lambda a, b, c, logits: logits[:2]),
    "draft length": lambda: prompt_lookup(33),
    "length and tree": lambda: draft_model(TINY, 3, tree=TREE),
    "no such head": lambda: specjax.load_head("nowhere"),
    "a tree first": lambda: stacked(draft_model(TINY, tree=TREE), prompt_lookup(2)),
    "a class": lambda: generate(drafter=PromptLookup),
    "no drafter": lambda: generate(drafter="lookup"),
    "no such rule": lambda: generate(rule="tokens"),
    "a rule for chains": lambda: generate(rule="token", drafter=draft_model(TINY, tree=TREE)),
    "a rule for other laws": lambda: generate(rule="kseq", drafter=prompt_lookup(2)),
    "a lossy rule": lambda: generate(rule="typical", drafter=prompt_lookup(2)),
    "greedy that samples": lambda: generate(rule="greedy", drafter=prompt_lookup(2)),
    "too many outcomes": lambda: specjax.certify("token", depth=20),
    "no such model": lambda: specjax.load_model("nonsense"),
    "no such path": lambda: specjax.load_model("./nonsense"),
    "no config": lambda: specjax.load_model(ROOT / "docs"),
    "dtype": lambda: specjax.load_model("smollm2-135m-instruct", dtype="float8"),
    "a revision here": lambda: specjax.load_model(ROOT / "docs", revision="main"),
    "no network": lambda: _raise(_reason(find_card("smollm2-135m-instruct"), 1, "ERROR: NewConnectionError: no route")),
    "K": lambda: parse_drafter("lookup", 33),
    "no such drafter": lambda: parse_drafter("guess", None),
    "a drafter without its model": lambda: parse_drafter("draft", None),
    "a drafter that is never asked": lambda: parse_drafter("draft=x+lookup", None),
    "none with a length": lambda: parse_drafter("none", 3),
    "processes": lambda: join_arguments("host:1", None, None, False, "data=2"),
    "processes without a mesh": lambda: join_arguments(None, None, None, True, None),
    "capacity": lambda: specjax.Engine(TINY, capacity=65),
    "a long request": lambda: submitted(request(max_tokens=15)),
    "logprobs": lambda: submitted(request(logprobs=1)),
    "many biases": lambda: submitted(request(logit_bias={1: 1.0, 2: 1.0}), max_logit_bias=1),
    "an id twice": lambda: submitted(request(id="a"), request(id="a")),
    "a full queue": lambda: submitted(request(), request(), max_queue=1),
    "a closed engine": closed,
    "memory": lambda: specjax.Engine(TINY, slots=1000, memory_limit=200_000),
    "a tiny memory": lambda: specjax.Engine(TINY, slots=2, memory_limit=1000),
    "no JSON": lambda: line("{"),
    "neither": lambda: line("{}"),
    "an unknown field": lambda: line('{"prompt": "a", "max_length": 3}'),
    "a setting of a line": lambda: line('{"prompt": "a", "top_p": 3}'),
    "another model": lambda: line(json.dumps({"url": "/v1/completions", "custom_id": "a", "body": {"model": "gpt"}})),
    "a stream in a batch": lambda: line(json.dumps({"url": "/v1/completions", "custom_id": "a", "body": {"stream": True}})),
    "mesh": lambda: parse_mesh("4x2"),
    "devices": lambda: make_mesh(1000, 1000),
    "slots and mesh": lambda: specjax.Engine(TINY, slots=3, mesh="data=2"),
    "a model that is not split": lambda: specjax.Engine(TINY, slots=2, mesh="model=2"),
}


def _raise(message: str):
    raise RuntimeError(message)


@functools.cache
def raised(name: str) -> str:
    """The message of a mistake."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one it is, is what is tested)
        RAISED[name]()
    return str(caught.value)


@pytest.mark.parametrize("name", RAISED)
def test_a_mistake_has_its_place_in_the_page(name):
    assert [message for message in quoted() if matches(message, raised(name))], raised(name)


def test_the_page_quotes_what_the_code_says():
    assert len(quoted()) > 100
    assert len(set(quoted())) == len(quoted())
    made = [raised(name) for name in RAISED]
    wrong = [m for m in quoted() if not any(matches(m, text) for text in made) and not stands_in_the_sources(m)]
    assert not wrong


def test_a_message_that_changed_would_be_seen():
    (message,) = [message for message in quoted() if message.startswith("<file> holds no line")]
    assert stands_in_the_sources(message)
    assert not stands_in_the_sources(message.replace("no line", "no lines"))
    assert not stands_in_the_sources(message + " or two")
