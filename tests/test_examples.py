"""The examples run as they stand, and say what they promise."""

import json
import re
import runpy
import string
import sys
from pathlib import Path

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import specjax
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_model(capsys):
    runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "The same tokens as plain decoding." in output
    accepted = [int(number) for number in re.findall(r"(\d+) of \d+ drafted tokens accepted", output)]
    assert len(accepted) == 6
    assert sum(accepted) > 6


def test_json_answer(capsys, monkeypatch):
    """A model of random weights that spells: it has nothing to say but what the schema makes of it."""
    tokens = ["<unk>", "</s>", *string.printable[:95], "\n"]
    backend = tokenizers.Tokenizer(models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, eos_token="</s>", chat_template="{{ messages[0].content }}")
    config = DecoderConfig(
        vocab_size=98, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4, mlp_width=16, max_positions=512
    )
    decoder = Decoder(config)
    model = specjax.Model(
        functions=decoder,
        params=decoder.init(jax.random.key(0), scale=0.5),
        vocab_size=98,
        max_positions=512,
        tokenizer=tokenizer,
        stop_token_ids=(1,),
    )
    monkeypatch.setattr(specjax, "load_model", lambda name: model, raising=False)
    monkeypatch.setattr(sys, "argv", ["json_answer.py"])
    runpy.run_path(str(EXAMPLES / "json_answer.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "The same tokens: True." in output
    answers = re.findall(r"(.*)  \(stop, .* tokens per round\)", output)
    assert set(json.loads(answers[0])) == {"city", "country", "capital"}


def test_own_rule(capsys):
    runpy.run_path(str(EXAMPLES / "own_rule.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "right_residual=False): lossless False, error 2e-01\n  after the prompt (1,), (0,) has probability" in output
    assert "right_residual=True): lossless True" in output
    assert "1.772 tokens per round; token verification 2.053" in output


def test_own_drafter(capsys):
    runpy.run_path(str(EXAMPLES / "own_drafter.py"), run_name="__main__")
    output = capsys.readouterr().out
    wrong, right = re.findall(r"says_what_it_draws=\w+\): lossless (\w+), error (\S+)", output)
    assert (wrong[0], right[0]) == ("False", "True")
    assert float(wrong[1]) > 1e-3 > 1e-12 > float(right[1])
    assert "\n  after the prompt (1,), (1, 0) has probability" in output
    lines = re.findall(r"(\d+) of (\d+) drafted tokens accepted, ([\d.]+) tokens per round", output)
    assert len(lines) == 2
    # It learns: one that knows nothing has one token in 32 right.
    assert all(int(accepted) > int(drafted) / 16 for accepted, drafted, _ in lines)
