"""Trained heads saved and loaded, and public Medusa files."""

import dataclasses
import json
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.certificates.tiny import table_model
from specjax.checkpoints.heads import find_head, heads_of, load_head, save_head, shipped_heads
from specjax.checkpoints.medusa_files import load_medusa
from specjax.models.config import ExpertsConfig, Llama3RopeScaling, RopeConfig, YarnRopeScaling
from specjax.models.eagle_head import EagleConfig
from specjax.tree import DraftTree
from tests import heads

ROPE = RopeConfig(5e4, Llama3RopeScaling(8.0, 1.0, 4.0, 64))


def scaled_target():
    return heads.target(config=dataclasses.replace(heads.CONFIG, rope=ROPE))


def special_target():
    """With an option of every kind that a card must bring back."""
    local = {"window": 5, "local_layers": (0,), "local_rope": RopeConfig(70.0, YarnRopeScaling(2.0, 32))}
    special = local | {"experts": ExpertsConfig(2, 1), "logit_soft_cap": 4.0, "activation": "gelu_tanh"}
    return heads.target(config=dataclasses.replace(heads.CONFIG, rope=ROPE, **special))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    eagle = dataclasses.replace(
        heads.eagle_head(scaled_target()), tree=DraftTree((-1, 0, 0, 1)), facts={"licence": "Apache-2.0", "tokens": 5}
    )
    save_head(eagle, folder / "eagle", jnp.float32)
    save_head(heads.medusa_heads(num_blocks=2), folder / "medusa")
    save_head(heads.draft_layers(special_target(), num_layers=2), folder / "draft", jnp.float32)
    return folder


def test_a_round_trip_changes_no_bit(folders):
    """Cases 198 and 11: blocks under whole numbers come back as such, and the vocabulary map is the saved one."""
    saved, loaded = heads.eagle_head(scaled_target()), load_head(folders / "eagle")
    chex.assert_trees_all_equal(loaded.params, saved.params)
    assert loaded.functions == saved.functions
    assert loaded.functions.config.layer.rope == ROPE
    assert (loaded.target, loaded.feature_layers, loaded.tree) == (saved.target, saved.feature_layers, DraftTree((-1, 0, 0, 1)))
    assert loaded.ids.tolist() == heads.IDS.tolist()
    assert loaded.facts == {"licence": "Apache-2.0", "tokens": 5}
    saved, loaded = heads.draft_layers(special_target(), num_layers=2), load_head(folders / "draft")
    chex.assert_trees_all_equal(loaded.params, saved.params)
    assert sorted(loaded.params) == ["final_norm", "layers"]
    assert (loaded.functions, loaded.feature_layers, loaded.ids.tolist()) == (saved.functions, (), heads.IDS.tolist())
    saved, loaded = heads.medusa_heads(num_blocks=2), load_head(folders / "medusa")
    assert sorted(loaded.params["blocks"]) == [0, 1]
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), saved.params)
    chex.assert_trees_all_equal(loaded.params, halved)


def test_a_card_may_be_older_than_some_options(tmp_path):
    """A card that names no more than the first options of a decoder; the others are then off."""
    folder = tmp_path / "older"
    shutil.copytree(shipped_heads()["smollm2-135m-instruct-eagle"], folder)
    card = json.loads((folder / "card.json").read_text())
    layer = card["config"]["layer"]
    for name in list(layer)[list(layer).index("tied_embedding") + 1 :]:
        del layer[name]
    assert "window" not in layer
    (folder / "card.json").write_text(json.dumps(card))
    layer = load_head(folder).functions.config.layer
    assert layer.not_plain() == []
    assert (layer.query_key_norm, layer.activation) == (False, "silu")


def edited(folders, tmp_path, name, change):
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    card = json.loads((folder / "card.json").read_text())
    change(card)
    (folder / "card.json").write_text(json.dumps(card))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("medusa", lambda card: card.update(format=2), r"format is 2; this version reads 1"),
        ("medusa", lambda card: card.update(kind="hydra"), r"kind is 'hydra'; it must be one of medusa, eagle, draft"),
        ("medusa", lambda card: card.pop("facts"), r"facts is missing"),
        (
            "medusa",
            lambda card: card["config"].update(num_heads=4),
            r"params: head.blocks.0.bias is bfloat16\[3, 16\]; the card says",
        ),
        ("medusa", lambda card: card["config"].update(num_blocks=1), r"params: the array head.blocks.1.bias belongs to no part"),
        ("medusa", lambda card: card["config"].update(own_output=True), r"params: the array head.output is missing"),
        (
            "medusa",
            lambda card: card["config"].update(draft_vocab_size=12),
            r"params: ids is int32\[13\]; the card says int32\[12\]",
        ),
        ("medusa", lambda card: card["config"].update(width=0), r"card.json: MedusaConfig: width is 0"),
        ("medusa", lambda card: card["config"].update(colour=1), r"card.json: .*colour"),
        ("eagle", lambda card: card.update(dtype="bfloat16"), r"is float32\[.*; the card says bfloat16"),
        ("eagle", lambda card: card.update(tree=[-1, 3]), r"card.json: DraftTree: node 1 has parent 3"),
        ("eagle", lambda card: card["target"].update(width=8), r"made for width 16 and 23 tokens, its target has width 8"),
        (
            "draft",
            lambda card: card["config"]["decoder"].update(num_layers=1),
            r"params: the array head.layers.1.\S+ belongs to no part",
        ),
        (
            "draft",
            lambda card: card["config"].update(draft_vocab_size=24),
            r"DraftConfig: draft_vocab_size is 24",
        ),
        ("eagle", lambda card: card["config"]["layer"]["rope"]["scaling"].update(kind="Odd"), r"card.json: 'Odd'"),
    ],
)
def test_a_card_that_does_not_fit(folders, tmp_path, name, change, message):
    with pytest.raises(ValueError, match=message):
        load_head(edited(folders, tmp_path, name, change))


def test_damaged_folders(folders, tmp_path):
    with pytest.raises(ValueError, match=r"no trained head is called 'nothing'"):
        load_head("nothing")
    with pytest.raises(ValueError, match=r"no trained head; there is no card.json"):
        load_head(tmp_path)
    with pytest.raises(ValueError, match=r"exists already; name a new folder"):
        save_head(heads.medusa_heads(), folders / "medusa")
    whole = edited(folders, tmp_path, "medusa", lambda card: None)
    (whole / "card.json").write_text("{")
    with pytest.raises(ValueError, match=r"card.json: "):
        load_head(whole)
    # Every file of the parameters, one at a time: cut to half of its length, one bit turned, gone; and one too many.
    files = [path.relative_to(folders / "eagle") for path in (folders / "eagle" / "params").rglob("*") if path.is_file()]
    assert len(files) >= 5
    folder = tmp_path / "damaged"
    shutil.copytree(folders / "eagle", folder)
    for file in files:
        content = (folder / file).read_bytes()
        turned = bytes([*content[:-1], content[-1] ^ 1])
        for damage in (content[: len(content) // 2], turned):
            (folder / file).write_bytes(damage)
            with pytest.raises(ValueError, match=re.escape(f"{folder / file}: damaged or cut short")):
                load_head(folder)
        (folder / file).unlink()
        with pytest.raises(ValueError, match=re.escape(f"{folder / file}: the file is missing")):
            load_head(folder)
        (folder / file).write_bytes(content)
    chex.assert_trees_all_equal(load_head(folder).params, heads.eagle_head(scaled_target()).params)
    (folder / "params" / "more").touch()
    with pytest.raises(ValueError, match=r"params/more: the card knows no such file"):
        load_head(folder)
    shutil.rmtree(whole / "params")
    (whole / "card.json").write_text((folders / "medusa" / "card.json").read_text())
    with pytest.raises(ValueError, match=r"params: the parameters are missing"):
        load_head(whole)


def medusa_folder(path, own_output, num_heads=2, num_blocks=1, file="medusa_lm_head.safetensors", drop=(), prefix=""):
    """A folder of the published form; returns its tensors."""
    random = np.random.default_rng(0)
    path.mkdir()
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = random.normal(size=(16, 16)).astype(np.float32)
            tensors[f"{head}.{block}.linear.bias"] = random.normal(size=16).astype(np.float32)
        if own_output:
            tensors[f"{head}.{num_blocks}.weight"] = random.normal(size=(23, 16)).astype(np.float32)
    kept = {prefix + name: tensor for name, tensor in tensors.items() if name not in drop}
    safetensors.numpy.save_file(kept, path / file)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, "_name_or_path": "org/heads"}
    (path / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(("own_output", "prefix"), [(True, ""), (False, "medusa_head.")])
def test_public_medusa_files(tmp_path, own_output, prefix):
    """Case 123: both layouts, told apart by the names."""
    tensors = medusa_folder(tmp_path / "heads", own_output, num_blocks=2, prefix=prefix)
    loaded = load_medusa(tmp_path / "heads", heads.target())
    hidden = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    shared = loaded.shared(heads.target())
    logits = loaded.functions.logits(loaded.params, shared, jnp.asarray(hidden))
    for head in range(2):
        state = hidden
        for block in range(2):
            moved = state @ tensors[f"{head}.{block}.linear.weight"].T + tensors[f"{head}.{block}.linear.bias"]
            state = state + moved / (1 + np.exp(-moved))
        matrix = tensors[f"{head}.2.weight"] if own_output else heads.target().params["embedding"]
        np.testing.assert_allclose(logits[:, head], state @ matrix.T, rtol=2e-4, atol=2e-4)
    assert loaded.facts["source"] == "org/heads"


def test_public_medusa_files_that_do_not_fit(tmp_path):
    target = heads.target()
    medusa_folder(tmp_path / "short", True, drop=["1.0.linear.bias"])
    with pytest.raises(
        ValueError, match=r"2 heads of 1 blocks \(config.json\) for 'tiny': the tensor 1.0.linear.bias is missing"
    ):
        load_medusa(tmp_path / "short", target)
    medusa_folder(tmp_path / "wide", True)
    other = heads.target(config=dataclasses.replace(heads.CONFIG, vocab_size=29))
    with pytest.raises(ValueError, match=r"0.1.weight has shape \(23, 16\); it must be \(29, 16\)"):
        load_medusa(tmp_path / "wide", other)
    medusa_folder(tmp_path / "more", True, num_heads=3)
    config = tmp_path / "more" / "config.json"
    config.write_text(config.read_text().replace('"medusa_num_heads": 3', '"medusa_num_heads": 2'))
    with pytest.raises(ValueError, match=r"the tensor 2.0.linear.\w+ has no place"):
        load_medusa(tmp_path / "more", target)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "medusa_lm_head.pt").write_bytes(b"\x80")
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt may hold them, but pickles are never read"):
        load_medusa(tmp_path / "pickled", target)
    with pytest.raises(ValueError, match=r"there is no config.json"):
        load_medusa(tmp_path, target)


def test_nothing_in_a_folder_tells_where_it_was_written(tmp_path):
    folder = save_head(heads.eagle_head(), tmp_path / "head")
    told = [path for path in folder.rglob("*") if path.is_file() and str(tmp_path).encode() in path.read_bytes()]
    assert not told


def test_what_ships_is_small_and_tells_how_it_was_made():
    shipped = shipped_heads()
    assert {"smollm2-135m-instruct-eagle", "smollm2-135m-instruct-medusa"} <= shipped.keys()
    sizes = {name: sum(path.stat().st_size for path in folder.rglob("*")) for name, folder in shipped.items()}
    assert max(sizes.values()) <= 12e6
    assert sum(sizes.values()) <= 30e6
    for head in map(load_head, shipped):
        needed = {"command", "data", "licence", "training_tokens", "stages", "target_sha256", "vocabulary_coverage", "accuracies"}
        assert needed | {"evaluation"} <= head.facts.keys()
        draft, least = {"eagle": ("chain of 4", 1.6), "medusa": ("tree of 16", 1.5)}[head.kind]
        assert head.facts["evaluation"]["tokens_per_round"][draft] > least
        # A path of the machine that it was made on says nothing to others.
        assert re.search(r"[\s'\"]/\w", json.dumps(head.facts)) is None


def test_a_target_is_known_by_its_weights(folders, tmp_path, monkeypatch):
    shipped = {"medusa": folders / "medusa", "eagle": save_head(heads.eagle_head(heads.target(seed=3)), tmp_path / "eagle")}
    monkeypatch.setattr("specjax.checkpoints.heads.shipped_heads", lambda: shipped)
    target = heads.target()
    renamed = dataclasses.replace(target, name="somewhere/model.gguf")
    assert [head.kind for head in heads_of(renamed)] == ["medusa"]
    assert find_head("medusa", renamed).target.name == target.name
    assert [head.kind for head in heads_of(heads.target(seed=3))] == ["eagle"]
    # Of a model of other sizes no number is read: its weights may be spread over several processes.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), heads.layered_target().params)
    assert heads_of(dataclasses.replace(heads.layered_target(), params=shapes)) == []
    others = dataclasses.replace(target, params=jax.tree.map(lambda leaf: 1.1 * leaf, target.params)), table_model(5, seed=0)
    for other in others:
        assert heads_of(other) == []
        with pytest.raises(ValueError, match=r"no medusa head for .* comes with specjax; train one \(scripts/train_medusa.py\)"):
            find_head("medusa", other)


def test_an_autoregressive_head_is_a_plain_layer():
    layer = dataclasses.replace(heads.CONFIG, num_layers=1)
    with pytest.raises(ValueError, match=r"layer has post_norms True; a head has none \(see DecoderConfig.plain_layer\)"):
        EagleConfig(dataclasses.replace(layer, post_norms=True))
    EagleConfig(dataclasses.replace(special_target().config, post_norms=True).plain_layer())
