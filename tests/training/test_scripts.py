"""The training scripts: what they refuse, and a short run from texts to a checkpoint."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints.heads import load_head
from specjax.training.texts import Texts

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "golden" / "tiny-llama"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"\n', r"prompts.jsonl: line 2 is not JSON: Expecting ',' delimiter"),
        ('{"prompt": "a"}\n\n', r"prompts.jsonl: line 2 is not JSON"),
        ('["a"]\n', r"prompts.jsonl: line 1 has neither 'prompt' nor 'turns' with a text"),
        ('{"turns": []}\n', r"prompts.jsonl: line 1 has neither"),
        ('{"prompt": 3}\n', r"prompts.jsonl: line 1 has neither"),
    ],
)
def test_prompt_files_that_are_malformed(scripts, tmp_path, lines, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(SystemExit, match=message):
        scripts("training_run").read_prompts(path)


def test_prompt_files(scripts, tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b", "first", "\u00e9"]
    path.write_text(
        "\n".join(
            json.dumps(line, ensure_ascii=False) for line in ({"prompt": texts[0]}, {"turns": texts[1:]}, {"prompt": texts[2]})
        )
    )
    assert scripts("training_run").read_prompts(path) == texts
    with pytest.raises(SystemExit, match=r"none.jsonl: .*No such file"):
        scripts("training_run").read_prompts(tmp_path / "none.jsonl")


def test_a_draft_model_from_texts_to_its_card(scripts, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    Texts.of_rows([random.integers(90, size=12).tolist() for _ in range(6)], [3] * 6).save(tmp_path / "texts.npz")
    common = ["train_draft.py", "--target", str(TINY), "--texts", str(tmp_path / "texts.npz"), "--work", str(tmp_path / "work")]
    common += ["--output", str(tmp_path / "draft"), "--draft-vocab-size", "50", "--held-out", "0.3", "--steps", "2"]
    module = scripts("train_draft")
    run = scripts("training_run").run

    def call(*more):
        monkeypatch.setattr(sys, "argv", [*common, *more])
        run("", module.train_draft, "draft", 1, 1e-3, module.OWN, module.check)

    with pytest.raises(ValueError, match=r"layers is \(0, 7\); it must hold at least one of 0 to 1"):
        call("--layers", "0,7")
    assert not (tmp_path / "work").exists()
    call("--layers", "1", "--licence", "CC0-1.0")
    trained = load_head(tmp_path / "draft")
    assert (trained.kind, trained.functions.config.decoder.num_layers, trained.ids.shape) == ("draft", 1, (50,))
    assert trained.facts["layers"] == [1]
    assert trained.facts["licence"] == "CC0-1.0"
    assert trained.facts["command"].startswith("python scripts/train_draft.py --target tiny-llama --texts texts.npz --work work")
    assert len(json.loads((tmp_path / "work" / "curves.json").read_text())) == 1
    # It goes on with texts whose tokens are others, and knows the same as before.
    Texts.of_rows([random.integers(60, 90, size=12).tolist() for _ in range(6)], [3] * 6).save(tmp_path / "others.npz")
    places = {"--texts": "others.npz", "--work": "more", "--output": "further"}
    common = ["train_draft.py", "--target", str(TINY), "--start", str(tmp_path / "draft"), "--held-out", "0.3", "--steps", "2"]
    common += [part for option, name in places.items() for part in (option, str(tmp_path / name))]
    with pytest.raises(SystemExit, match=r"--draft-vocab-size is 40; --start .* has its own tokens"):
        call("--draft-vocab-size", "40")
    call()
    further = load_head(tmp_path / "further")
    np.testing.assert_array_equal(further.ids, trained.ids)
    before = further.facts["started_from"]
    assert before == {name: trained.facts[name] for name in before}
    assert set(before) >= {"command", "stages"}
