"""A tiny chat model as a folder on disk, and a way to call the program."""

import dataclasses
import json
import pathlib
import shutil
import string

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.cli import main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "tiny-llama"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """Path of a folder: the tiny random llama, a tokenizer of single characters, and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    shutil.copytree(GOLDEN, folder)
    characters = ["<unk>", "<s>", "</s>", *string.printable[:95], "\n"]
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(characters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    return str(folder)


@dataclasses.dataclass
class Outcome:
    """How a call ended.

    Attributes:
      code: exit status.
      out: standard output.
      err: standard error.
    """

    code: int
    out: str
    err: str


@pytest.fixture
def specjax_command(capsys, monkeypatch):
    """Calls the program in this process: ``specjax_command("generate", "--json")``."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        captured = capsys.readouterr()
        return Outcome(exit_.value.code, captured.out, captured.err)

    return call
