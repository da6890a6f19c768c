"""Prompts: those that come along, and what is said of files that hold none."""

import types

import pytest

from specjax.benchmark.prompts import KINDS, Prompt, built_in_prompts, check_turns, conversations, read_prompts, some_of_each


def test_the_built_in_prompts_are_of_six_kinds_and_all_different():
    prompts = built_in_prompts()
    assert len(prompts) >= 60
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    for kind in KINDS:
        assert sum(prompt.kind == kind for prompt in prompts) >= 10
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        # What is to be summarised or looked through stands in the prompt.
        if prompt.kind in ("summary", "extraction"):
            assert len(prompt.turns[0].split()) > 35, prompt


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no prompt; each line is a JSON object with prompt or turns"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{', "line 2: no JSON: "),
        ("[1]", "line 1: it is [1]; it must be an object with one of prompt (a text) and turns (a list of texts)"),
        ('{"question": "a"}', "line 1: it has ['question']; it must be an object with one of prompt"),
        ('{"prompt": "a", "turns": ["a"]}', "line 1: it has ['prompt', 'turns']; it must be an object with one of"),
        ('{"prompt": ""}', "line 1: prompt is ''; it must be a text, none of them empty"),
        ('{"prompt": 3}', "line 1: prompt is 3; it must be a text"),
        ('{"turns": "abc"}', "line 1: turns is 'abc'; it must be a list of texts"),
        ('{"turns": []}', "line 1: turns is []; it must be a list of texts"),
        ('{"turns": ["a", ""]}', "line 1: turns is ['a', '']; it must be a list of texts, none of them empty"),
        ('{"prompt": "a", "category": 7}', "line 1: category is 7; it must be a text"),
    ],
)
def test_files_that_are_malformed(tmp_path, lines, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=r"prompts\.jsonl") as caught:
        read_prompts(path)
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"none.jsonl cannot be read: No such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ValueError, match="latin is not UTF-8"):
        read_prompts(tmp_path / "latin")


def test_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "question_id": 3}\n\n{"turns": ["b", "c"], "category": "x"}\n')
    assert read_prompts(path) == [Prompt("all", ("a",)), Prompt("x", ("b", "c"))]


def test_some_of_each_kind_are_spread_over_the_file():
    prompts = [Prompt(kind, (str(n),)) for n, kind in enumerate("aabaaabaab")]
    assert [prompt.turns[0] for prompt in some_of_each(prompts, 2)] == ["0", "2", "4", "6"]
    assert some_of_each(prompts, 3)[-1] == prompts[9]
    assert some_of_each(prompts, 100) == some_of_each(prompts, None) == prompts


class Characters:
    """A tokenizer of characters, which writes roles as digits."""

    chat_template = "there is one"

    def encode(self, text):
        return [ord(character) for character in text]

    def encode_chat(self, messages):
        return self.encode("".join(f"{len(message['role'])}{message['content']}" for message in messages))


def test_every_turn_is_asked_behind_the_answers_to_those_before():
    model = types.SimpleNamespace(tokenizer=Characters(), name="m")
    answered = []

    def answer(ids):
        answered.append(bytes(ids).decode())
        return f"A{len(answered)}"

    found = conversations(model, [Prompt("x", ("q1", "q2", "q3")), Prompt("y", ("r",))], answer)
    assert [(kind, bytes(ids).decode()) for kind, ids in found] == [
        ("x", "4q1"),
        ("x", "4q19A14q2"),
        ("x", "4q19A14q29A24q3"),
        ("y", "4r"),
    ]
    assert answered == ["4q1", "4q19A14q2"]  # nothing is answered that nobody follows


def test_without_a_chat_template_the_text_is_asked_as_it_is():
    tokenizer = Characters()
    tokenizer.chat_template = None
    model = types.SimpleNamespace(tokenizer=tokenizer, name="m")
    assert conversations(model, [Prompt("x", ("q",))], None) == [("x", [ord("q")])]
    with pytest.raises(ValueError, match="model 'm' has no chat template; prompts of several turns need one"):
        check_turns(model, [Prompt("x", ("q", "r"))])
