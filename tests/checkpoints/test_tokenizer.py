import copy
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models

from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.tokenizer import Tokenizer, compare_tokenizers
from specjax.checkpoints.tokenizer_files import read_tokenizer as read_folder
from specjax.checkpoints.tokenizer_gguf import read_tokenizer, stop_token_ids
from tests.checkpoints import tiny

HARD = [
    "",
    " ",
    "    ",
    "a  ",
    "Hello world",
    "  two spaces   three    four\t\ttabs\n\n\nnewlines \n mixed \r\n crlf \r cr",
    "def f(x):\n    return x**2 if x >= 10 else {'a': [1, 2.5e-3, 0xFF]}  # comment\n\tpass\n",
    "I'm you're they'VE we'll HE'D it's 'tis don’t",
    "👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 😀😀",
    "日本語のテキスト、漢字とカタカナ。 中文字符，標點。 한국어 텍스트",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤",
    "e\u0301 n\u0303 o\u0308\u0323 \u1e9b\u0323 A\u030a ﬁ \u212b \u1112\u1161\u11ab",
    "\x00\x01\x02\x1b[0m\x7f\x85\u200b\u200e\ufeff\u2028\u2029\ufffd\U0010ffff",
    "1234567890 12 345 3.14159 1,000,000 ½ ² ٣ Ⅳ ①  7   8",
    "<|im_start|>system\nYou<|im_end|> <|endoftext|>x<|im_start|> y <|im_start|",
    "!!!???...---===>>>||| @#$%^&*()_+`~",
]
# Merges that cross each kind of border: a wrong cut gives other ids.
EXTRA = ("12", "Ġ1", "aĠ", "ĠĠ", "Ġa", "ĠH", "el", "'s", "'V", "..", "ĊĊ", "(x", "ï¼", "=Ġ", "Ì£", "eÌ")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


def write(path, vocabulary):
    """A GGUF file whose tokenizer alone matters."""
    return GGUFFile(tiny.write_gguf(path, {"x": np.ones(32, np.float32)}, vocabulary=vocabulary))


def from_gguf(path, **vocabulary):
    return read_tokenizer(write(path, tiny.byte_vocabulary(**vocabulary)))


def reference(pre):
    """The tokenizer as published tokenizer.json files of each family define it, over the tiny vocabulary."""
    keys = tiny.byte_vocabulary(extra=EXTRA)
    vocabulary = {token: id for id, token in enumerate(keys["ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in keys["ggml.merges"]]
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = tokenizers.Tokenizer(tokenizer_models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "qwen2": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "llama-bpe": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(words.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }[pre]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_gguf_equals_reference_on_hard_text(path, pre):
    tokenizer, wanted = from_gguf(path, pre=pre, extra=EXTRA, ggml__add_bos_token=False), reference(pre)
    for text in HARD:
        ids = tokenizer.encode(text)
        assert ids == wanted.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == normalised(pre, text)


def normalised(pre, text):
    return normalizers.NFC().normalize_str(text) if pre == "qwen2" else text


def test_hard_text_tells_the_cuttings_apart():
    """Otherwise the test above could not fail."""
    ids = {pre: [reference(pre).encode(text).ids for text in HARD] for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe")}
    assert all(ids[one] != ids[two] for one in ids for two in ids if one != two)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("ab12 a1", ["ab", "1", "2", "Ġa", "1"]), ("é", ["Ã", "©"]), ("a<|im_end|>b", ["a", "<|im_end|>", "b"])],
)
def test_smollm_pieces(path, text, pieces):
    tokenizer = from_gguf(path, extra=(*EXTRA, "ab"))
    assert [tokenizer.vocabulary()[id] for id in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    ("vocabulary", "match"),
    [
        ({"pre": "something-new"}, "tokenizer.ggml.pre is 'something-new'; known are gpt-2, gpt2, llama-bpe"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"ggml__model": "bert"}, r"tokenizer.ggml.model is 'bert'; supported: 'gpt2' \(byte-level\), 'llama'"),
        ({"ggml__token_type": [1, 1]}, "token_type has 2 entries, there are 260 tokens"),
        ({"ggml__merges": ["a b c"]}, r"merges\[0\] is 'a b c'; it must be two tokens"),
        ({"ggml__merges": ["a b", "a zz"]}, r"merges\[1\] is 'a zz'; 'zz' is not in the vocabulary"),
        ({"ggml__eos_token_id": 999}, "the id of eos_token is 999, which the vocabulary of 260 ids does not have"),
        ({"ggml__tokens": None}, "tokenizer.ggml.tokens is missing or empty"),
        ({"ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"ggml__tokens": [*tiny.byte_vocabulary()["ggml.tokens"][:-1], "b"]}, "token 'b' stands twice .* ids 68 and 259"),
        ({"ggml__bos_token_id": None, "ggml__add_bos_token": True}, "add_bos_token is set, but there is no bos_token_id"),
    ],
)
def test_gguf_vocabulary_that_cannot_be_read(path, vocabulary, match):
    with pytest.raises(ValueError, match=match) as caught:
        from_gguf(path, **vocabulary)
    assert str(path) in str(caught.value)


def test_gguf_without_vocabulary(path):
    assert read_tokenizer(write(path, {})) is None


def test_padding_is_no_part_of_the_vocabulary(path):
    """Ids of the kind "unused" fill the embedding up; behind the tokenizer's size nothing may be emitted."""
    keys = tiny.byte_vocabulary()
    tokens, kinds = keys["ggml.tokens"], keys["ggml.token_type"]
    tokenizer = from_gguf(path, ggml__tokens=[*tokens, "[PAD1]", "[PAD2]"], ggml__token_type=[*kinds, 5, 5])
    assert tokenizer.size == len(tokens)
    assert len(tokenizer.encode("[PAD1]")) == 6


def test_user_defined_tokens_are_found_and_shown(path):
    keys = tiny.byte_vocabulary()
    tokenizer = from_gguf(path, ggml__tokens=[*keys["ggml.tokens"], "<tool>"], ggml__token_type=[*keys["ggml.token_type"], 4])
    assert tokenizer.encode("<tool>") == [260]
    assert tokenizer.decode([260, 1]) == "<tool>"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_stop_ids_of_gguf(path):
    """Named by key (end of sequence, end of turn), and control tokens that are known to end texts; each once."""

    def stops(**changes):
        return stop_token_ids(write(path, tiny.byte_vocabulary(**changes)))

    assert stops() == (2, 0)
    assert stops(ggml__eos_token_id=0, ggml__eot_token_id=5) == (0, 5, 2)
    assert stops(ggml__token_type=[1] * 260) == (2,)


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({"pre": "smollm"}, [], []),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "ggml__add_bos_token": False}, [], []),
        ({"pre": "gpt-2", "ggml__add_bos_token": True, "ggml__add_eos_token": True}, [1], [2]),
    ],
)
def test_tokens_around_a_text(path, changes, first, last):
    tokenizer = from_gguf(path, **changes)
    assert tokenizer.encode("a") == [*first, 67, *last]
    assert tokenizer.encode("a", add_special_tokens=False) == [67]


# A template that writes the beginning-of-sequence token itself, as most do.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_exactly_one_bos(path):
    tokenizer = from_gguf(path, pre="llama-bpe", chat_template=TEMPLATE)
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).count(1) == 1
    assert tokenizer.encode("Hi").count(1) == 1


def test_render_chat(path):
    tokenizer = from_gguf(path, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "<b> 'é'"}, {"role": "assistant", "content": "ok"}]
    text = "<|im_start|>user: <b> 'é'<|im_end|>\nassistant: ok<|im_end|>\n"
    assert tokenizer.render_chat(messages) == text + "assistant:"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text
    assert tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False) == text + "assistant:"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}y", "y"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_what_templates_expect(template, text):
    tokenizer = Tokenizer(tiny.word_tokenizer(["a"]), chat_template=template)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == text


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('no system role') }}", "refuses these messages: TemplateError: no system role"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{% if %}", "chat template: line 1: "),
    ],
)
def test_template_that_refuses(template, match):
    tokenizer = Tokenizer(tiny.word_tokenizer(["a"]), chat_template=template)
    with pytest.raises(ValueError, match=match):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is .*; it must be a non-empty list"),
        ("Hi", "messages is 'Hi'; it must be a non-empty list"),
        ({"role": "user", "content": "Hi"}, "it must be a non-empty list"),
        (["Hi"], r"messages\[0\] is 'Hi'; it must be a dict"),
        ([{"role": "user", "content": "Hi"}, {"content": "x"}], r"messages\[1\]\['role'\] is None"),
        ([{"role": "usr", "content": "Hi"}], r"messages\[0\]\['role'\] is 'usr' \(did you mean 'user'\?\)"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is None; it must be a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] is 3"),
    ],
)
def test_malformed_messages(messages, match):
    tokenizer = Tokenizer(tiny.word_tokenizer(["a"]), chat_template="x")
    with pytest.raises(ValueError, match=match):
        tokenizer.encode_chat(messages)


def test_no_template():
    with pytest.raises(ValueError, match="no chat template; give the prompt as text or ids"):
        Tokenizer(tiny.word_tokenizer(["a"])).render_chat([{"role": "user", "content": "Hi"}])


def test_bad_text_and_ids():
    tokenizer = Tokenizer(tiny.word_tokenizer(["a", "b"]))
    with pytest.raises(ValueError, match="text is 3; it must be a string"):
        tokenizer.encode(3)
    with pytest.raises(ValueError, match=r"half of a surrogate pair, '\\ud83d', at 1"):
        tokenizer.encode("a\ud83d")
    for id in (2, -1):
        with pytest.raises(ValueError, match=f"token id {id} is outside the vocabulary, 0 to 1"):
            tokenizer.decode([0, id])


def test_compare_tokenizers():
    target = Tokenizer(tiny.word_tokenizer(["x", "b", "c"]))
    compare_tokenizers(target, Tokenizer(tiny.word_tokenizer(["x", "b", "c"])))
    with pytest.raises(ValueError, match="id 0 is 'x' in the target and 'y' in the draft"):
        compare_tokenizers(target, Tokenizer(tiny.word_tokenizer(["y", "b", "d"])))
    with pytest.raises(ValueError, match="3 ids in the target and 2 in the draft"):
        compare_tokenizers(target, Tokenizer(tiny.word_tokenizer(["x", "b"])))


def write_folder(folder, backend=None, **files):
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def words():
    backend = tiny.word_tokenizer(["a", "b", "<s>", "</s>", "[unk]"])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def test_folder(tmp_path):
    backend = words()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    options = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    tokenizer = read_folder(write_folder(tmp_path, backend, tokenizer_config=options))
    assert tokenizer.encode("a b a b") == [2, 0, 1, 0, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.size) == (2, 3, 5)
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "<s>user: a</s>\nassistant:"
    assert tokenizer.vocabulary() == ["a", "b", "<s>", "</s>", "[unk]"]


def test_folder_equals_gguf(tmp_path, path):
    """One model from two formats: same ids, and no difference in the vocabulary."""
    ours = from_gguf(path, pre="qwen2", extra=EXTRA)
    theirs = read_folder(write_folder(tmp_path, reference("qwen2")))
    compare_tokenizers(ours, theirs)
    assert [ours.encode(text) for text in HARD] == [theirs.encode(text) for text in HARD]


def test_templates_of_a_folder(tmp_path):
    folder = write_folder(tmp_path, words(), special_tokens_map={"eos_token": "</s>"})
    assert read_folder(folder).chat_template is None
    assert read_folder(folder).eos_token == "</s>"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": several})
    assert read_folder(folder).chat_template == "d"
    write_folder(tmp_path, tokenizer_config={"chat_template": several[:1]})
    with pytest.raises(ValueError, match=r"chat_template has \['tool_use'\]; one must be called 'default'"):
        read_folder(folder)
    (tmp_path / "chat_template.jinja").write_text("j")
    assert read_folder(folder).chat_template == "j"


def test_added_tokens_of_a_folder(tmp_path):
    options = {"added_tokens_decoder": {"5": {"content": "<x>", "special": True}}}
    tokenizer = read_folder(write_folder(tmp_path, words(), tokenizer_config=options))
    assert tokenizer.encode("a <x>") == [0, 5]
    wrong = copy.deepcopy(options)
    wrong["added_tokens_decoder"] = {"9": {"content": "</s>"}}
    with pytest.raises(ValueError, match=r"token '</s>' has id 9; in tokenizer.json it is 3"):
        read_folder(write_folder(tmp_path, words(), tokenizer_config=wrong))


def test_folder_that_cannot_be_read(tmp_path):
    assert read_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"has tokenizer.model but no tokenizer.json"):
        read_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json: truncated or damaged tokenizer"):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match="eos_token is '</end>', which is not in the vocabulary"):
        read_folder(write_folder(tmp_path, words(), tokenizer_config={"eos_token": "</end>"}))
    with pytest.raises(ValueError, match="add_bos_token is true, but there is no bos_token"):
        read_folder(write_folder(tmp_path, words(), tokenizer_config={"add_bos_token": True}))
