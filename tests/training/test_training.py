"""From prompts to heads that accept: small runs on a tiny decoder, the same steps as on a real one."""

import dataclasses
import functools
import json

import chex
import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints.heads import load_head, save_head
from specjax.drafters import draft_model, eagle, medusa
from specjax.training.answers import write_answers
from specjax.training.batches import Batches
from specjax.training.draft import DraftObjective
from specjax.training.eagle import EagleObjective
from specjax.training.loop import TrainingSettings, train
from specjax.training.material import Material
from specjax.training.medusa import MedusaObjective
from specjax.training.recipes import Evaluation, train_draft, train_eagle, train_medusa
from specjax.training.states import StateStore
from specjax.training.texts import Texts
from tests import heads

SETTINGS = TrainingSettings(num_steps=40, learning_rate=3e-2, warmup_steps=5, evaluate_every=20, save_every=20)
QUIET = {"progress": lambda line: None}


def prepared(target, folder):
    random = np.random.default_rng(0)
    prompts = [random.integers(23, size=random.integers(1, 6)).tolist() for _ in range(48)]
    texts = write_answers(target, prompts, folder / "answers", max_tokens=40, rows_at_once=24)
    return Material.prepare(target, texts, folder / "states", draft_vocab_size=20, held_out=0.2, tokens_per_batch=1024, **QUIET)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return prepared(heads.cycling_target(), tmp_path_factory.mktemp("material"))


@pytest.mark.parametrize(
    ("train_head", "objective", "bind", "least"),
    [
        (functools.partial(train_eagle, depth=2), functools.partial(EagleObjective, depth=2), eagle, 0.55),
        (functools.partial(train_medusa, num_heads=2), MedusaObjective, medusa, 0.4),
    ],
    ids=["eagle", "medusa"],
)
def test_training_makes_drafts_that_are_accepted(material, train_head, objective, bind, least):
    """From near chance (1 in 16) to at least ``least`` at the first place, on texts that were not trained on."""
    trained, log = train_head(material, SETTINGS, **QUIET)
    untrained = trained.functions.init(jax.random.key(0))
    before = Evaluation(objective(trained.functions), material.shared, material)(untrained)["acceptance_by_position"][0]
    assert before < 0.2
    assert trained.facts["held_out"]["acceptance_by_position"][0] > least
    assert [entry["step"] for entry in log] == [20, 40]
    assert log[-1]["training_total"] < log[0]["training_total"]
    # The replay tells what decoding does.
    target = heads.cycling_target()
    prompts = [material.held_out.texts.prompt(row).tolist() for row in range(len(material.held_out.texts))]
    params = specjax.SamplingParams(temperature=0, max_tokens=40)
    plain = specjax.generate(target, prompts, params)
    drafts = specjax.generate(target, prompts, params, bind(trained, 2))
    assert [c.token_ids for c in drafts] == [c.token_ids for c in plain]
    rounds = sum(c.stats.num_drafts for c in drafts)
    assert sum(c.stats.num_accepted_tokens_per_pos[0] for c in drafts) / rounds > least - 0.15


def test_a_draft_model_is_distilled_saved_and_used(tmp_path):
    """The target's first layer, which knows nothing of what follows, learns it: from 0 accepted to more than 0.8."""
    target = heads.layered_target()
    material = prepared(target, tmp_path)
    trained, log = train_draft(material, SETTINGS, layers=[0], depth=2, **QUIET)
    before = Evaluation(DraftObjective(trained.functions), material.shared, material)
    start = {name: target.params[name] for name in ("layers", "final_norm")}
    assert before({**start, "layers": {0: start["layers"][0]}})["acceptance_by_position"][0] < 0.05
    assert trained.facts["layers"] == [0]
    assert trained.facts["held_out"]["acceptance_by_position"][0] > 0.8
    assert len(log[-1]["acceptance_by_position"]) == 2
    save_head(trained, tmp_path / "draft")
    # What is stored is its own; the target's matrices are not.
    card = json.loads((tmp_path / "draft" / "card.json").read_text())
    assert (card["kind"], card["feature_layers"], card["config"]["decoder"]["num_layers"]) == ("draft", [], 1)
    bound = draft_model(load_head(tmp_path / "draft"), 3)
    shared = bound.params_for(target)["shared"]
    assert shared["embedding"] is target.params["embedding"]
    assert shared["output"].shape == (20, 32)
    prompts = [material.held_out.texts.prompt(row).tolist() for row in range(4)]
    params = specjax.SamplingParams(temperature=0, max_tokens=40)
    plain = specjax.generate(target, prompts, params)
    drafts = specjax.generate(target, prompts, params, bound)
    assert [c.token_ids for c in drafts] == [c.token_ids for c in plain]
    rounds = sum(c.stats.num_drafts for c in drafts)
    assert sum(c.stats.num_accepted_tokens_per_pos[0] for c in drafts) / rounds > 0.6
    # Further training starts from what was trained.
    further, log = train_draft(material, SETTINGS, start=load_head(tmp_path / "draft"), depth=2, **QUIET)
    assert further.functions == trained.functions
    assert min(entry["acceptance_by_position"][0] for entry in log) > 0.8
    for change, message in (
        ({"layers": [2]}, r"layers is \(2,\); it must hold at least one of 0 to 1"),
        ({"layers": [0], "start": trained}, r"layers is \[0\] beside a start"),
        ({"start": heads.eagle_head(target)}, r"start is EagleHead.*; this run's is DraftLayers"),
        ({"start": heads.draft_layers()}, r"start was made for 'tiny' with width 16; the target 'layered' has width 32"),
    ):
        with pytest.raises(ValueError, match=message):
            train_draft(material, SETTINGS, **change, **QUIET)


def test_a_run_that_is_interrupted_ends_with_the_same_bits(material, tmp_path):
    head = heads.eagle_head()
    objective = EagleObjective(
        dataclasses.replace(head.functions, config=dataclasses.replace(head.functions.config, draft_vocab_size=20)), 2
    )
    settings = dataclasses.replace(SETTINGS, num_steps=8, evaluate_every=3, save_every=4)
    common = (head.params, material.shared, material.training, settings)
    whole, log = train(objective, *common, **QUIET)

    def interrupt(params):
        raise KeyboardInterrupt

    steps = []
    with pytest.raises(KeyboardInterrupt):
        train(
            objective,
            *common,
            evaluate=lambda params: steps.append(0) or ({} if len(steps) < 2 else interrupt(params)),
            folder=tmp_path,
            **QUIET,
        )
    lines = []
    resumed, resumed_log = train(objective, *common, folder=tmp_path, progress=lines.append)
    assert lines[0] == "goes on from step 4"
    chex.assert_trees_all_equal(resumed, whole)
    assert [entry["step"] for entry in resumed_log] == [3, 6, 8] == [entry["step"] for entry in log]
    # A run that has ended stays as it is.
    again, _ = train(objective, *common, folder=tmp_path, **QUIET)
    chex.assert_trees_all_equal(again, whole)


def test_a_mesh_of_devices_trains_the_same(material):
    head = heads.eagle_head()
    functions = dataclasses.replace(head.functions, config=dataclasses.replace(head.functions.config, draft_vocab_size=20))
    settings = dataclasses.replace(SETTINGS, num_steps=3)
    batches = dataclasses.replace(material.training, rows_multiple=4)
    common = (EagleObjective(functions, 2), head.params, material.shared, batches, settings)
    one, _ = train(*common, **QUIET)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    four, _ = train(*common, mesh=mesh, **QUIET)
    assert len(jax.tree.leaves(four)[0].sharding.device_set) == 4
    chex.assert_trees_all_close(jax.device_get(four), jax.device_get(one), atol=2e-4)


def test_answers_and_states_go_on_where_they_were(tmp_path, monkeypatch):
    target = heads.target()
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    whole = write_answers(target, prompts, tmp_path / "whole", max_tokens=8, rows_at_once=2)
    assert [whole.prompt(index).tolist() for index in range(4)] == prompts
    first = sorted((tmp_path / "whole").iterdir())[0].name
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / first).write_bytes((tmp_path / "whole" / first).read_bytes())
    assert write_answers(target, prompts, tmp_path / "part", max_tokens=8, rows_at_once=2).digest() == whole.digest()
    with pytest.raises(ValueError, match=r"holds the answers to other prompts"):
        write_answers(target, [[9], *prompts[1:]], tmp_path / "part", max_tokens=8, rows_at_once=2)
    # Greedy and sampled answers in turn: the greedy ones are those of plain decoding.
    alone = specjax.generate(target, [prompts[2]], specjax.SamplingParams(temperature=0, max_tokens=8))
    assert whole.row(2).tolist() == prompts[2] + alone[0].token_ids

    long = Texts.of_rows([[1, 2, 3] * 30, [4, 5], [6] * 70], [0, 1, 2])
    store = StateStore.make(target, long, (1, 2), tmp_path / "states")
    told = []
    again = StateStore.make(target, long, (1, 2), tmp_path / "states", lambda *done: told.append(done))
    assert not told
    np.testing.assert_array_equal(again.features, store.features)
    assert store.features.shape == (162, 2, 16)
    with pytest.raises(ValueError, match=r"asked for were those of"):
        StateStore.make(target, long, (2,), tmp_path / "states")
    with pytest.raises(ValueError, match=r"states are of 162 tokens, the texts have 2"):
        Batches(Texts.of_rows([[1, 2]], [0]), store)


def test_the_order_of_batches_depends_on_seed_and_step_alone(material):
    batches = dataclasses.replace(material.training, tokens_per_batch=256)
    per_epoch = len(batches.plan(0))

    def heads_of(step, count):
        stream = batches.from_step(step, seed=3)
        return [next(stream).tokens[:, :4].tolist() for _ in range(count)]

    whole = heads_of(0, 2 * per_epoch)
    assert heads_of(per_epoch - 1, 3) == whole[per_epoch - 1 : per_epoch + 2]
    assert whole[:per_epoch] != whole[per_epoch:]
    flat = sorted(str(row) for batch in whole[:per_epoch] for row in batch if any(row))
    assert flat == sorted(str(row) for batch in whole[per_epoch:] for row in batch if any(row))


def test_bad_settings(material):
    for change, message in (
        ({"num_steps": 0}, r"num_steps is 0; it must be a whole number of at least 1"),
        ({"learning_rate": 0}, r"learning_rate is 0; it must be a positive number"),
        ({"clip": float("inf")}, r"clip is inf"),
        ({"weight_decay": -1}, r"weight_decay is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SETTINGS, **change)
    with pytest.raises(ValueError, match=r"prompt_weight is 2; it must be from 0 to 1"):
        dataclasses.replace(material.training, prompt_weight=2)
    with pytest.raises(ValueError, match=r"start is .*; this run's is"):
        train_eagle(material, SETTINGS, start=heads.eagle_head(heads.cycling_target()), **QUIET)
