"""Models from a hub, against one on this machine."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants

from specjax.checkpoints import hub as hub_module
from specjax.checkpoints.download import DownloadError
from specjax.checkpoints.load import load_model
from specjax.cli import main
from tests.checkpoints import tiny
from tests.checkpoints.fake_hub import COMMIT, FakeHub


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, and files that nobody needs."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    tiny.write_folder(folder, tiny.hf_config(), tiny.hf_tensors(), generation_config={"eos_token_id": 2})
    tiny.word_tokenizer([f"w{id}" for id in range(40)]).save(str(folder / "tokenizer.json"))
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "model.onnx", "tokenizer.model"):
        (folder / name).write_bytes(b"not needed")
    return folder


NEEDED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub and an empty cache, which huggingface-hub uses instead of its own."""
    with FakeHub() as hub:
        use(hub.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def use(endpoint, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def offline(monkeypatch):
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def same(first, second):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b) and a.dtype == b.dtype, first, second))


def test_a_model_comes_from_the_hub_once(hub, folder, offline):
    hub.add("org/name", folder)
    expected = load_model(folder, dtype="float32")
    model = load_model("org/name", dtype="float32")
    assert (model.name, model.stop_token_ids, model.tokenizer.size) == ("org/name", (2,), 40)
    assert same(model.params, expected.params)
    assert set(hub.served) == NEEDED
    load_model("org/name", dtype="float32")
    assert len(hub.served) == len(NEEDED)
    offline()
    assert same(load_model("org/name", dtype="float32").params, expected.params)


def test_without_the_network_the_cache_is_enough(hub, folder, monkeypatch):
    hub.add("org/name", folder)
    first = load_model("org/name", dtype="float32")
    with FakeHub() as gone:
        closed = gone.endpoint
    use(closed, monkeypatch)
    assert same(load_model("org/name", dtype="float32").params, first.params)
    with pytest.raises(DownloadError, match=rf"'org/other' is no file or folder here and not.*in the cache .*{closed} cannot be"):
        load_model("org/other", dtype="float32")


def test_revision_and_subfolder(hub, folder):
    hub.add("org/name", folder, prefix="small/fine/")
    hub.branches["org/name"] = ["v2"]
    for revision in ("v2", COMMIT, None):
        model = load_model("org/name", dtype="float32", revision=revision, subfolder="small/fine")
        assert model.tokenizer.size == 40
    assert set(hub.served) == {f"small/fine/{name}" for name in NEEDED}
    with pytest.raises(DownloadError, match="'org/name' has no revision 'v3'"):
        load_model("org/name", dtype="float32", revision="v3", subfolder="small/fine")
    with pytest.raises(DownloadError, match=r"'org/name', folder 'large' on the hub: has no config.json"):
        load_model("org/name", dtype="float32", subfolder="large")
    with pytest.raises(DownloadError, match=r"'org/name' on the hub: has no config.json"):
        load_model("org/name", dtype="float32")


def test_several_files(hub, folder, tmp_path, offline):
    tensors = tiny.hf_tensors()
    places = {name: f"model-{1 + place % 2}-of-2.safetensors" for place, name in enumerate(tensors)}
    split = tmp_path / "split"
    split.mkdir()
    for file in set(places.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in tensors if places[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    hub.add("org/split", folder, without={"model.safetensors"})
    hub.add("org/split", split)
    assert same(load_model("org/split", dtype="float32").params, load_model(folder, dtype="float32").params)
    assert set(hub.served) == NEEDED - {"model.safetensors"} | {"model.safetensors.index.json", *places.values()}
    # A file that an interrupted download has not brought is missing, and is said to be.
    next((tmp_path / "cache").rglob("model-2-of-2.safetensors")).unlink()
    offline()
    with pytest.raises(DownloadError, match=r"'org/split' at revision '0123.* not, or not all of it, in the cache"):
        load_model("org/split", dtype="float32")


def test_what_the_hub_refuses(hub, folder, offline):
    hub.add("org/closed", folder)
    hub.gated.add("org/closed")
    with pytest.raises(DownloadError, match=r"'org/closed' is gated: ask for access at http://127.*/org/closed, log in"):
        load_model("org/closed", dtype="float32")
    with pytest.raises(DownloadError, match=r"'org/none' is no file or folder here, and http://127.* has no such repository"):
        load_model("org/none", dtype="float32")
    with pytest.raises(DownloadError, match=r"'org/na--me' is no file or folder here, and no id of a repository"):
        load_model("org/na--me", dtype="float32")
    offline()
    with pytest.raises(DownloadError, match=r"not, or not all of it, in the cache .*cache; HF_HUB_OFFLINE forbids"):
        load_model("org/none", dtype="float32")
    assert not hub.served


def test_pickles_are_never_fetched(hub, folder):
    hub.add("org/old", folder, without={"model.safetensors"})
    with pytest.raises(DownloadError, match=r"weights in pytorch_model.bin and no safetensors; .* nothing is ever unpickled"):
        load_model("org/old", dtype="float32")
    hub.repositories["org/other"] = {"config.json": hub.repositories["org/old"]["config.json"], "q8.gguf": b""}
    with pytest.raises(DownloadError, match=r"has no model.safetensors, but q8.gguf; download that file and give its path"):
        load_model("org/other", dtype="float32")
    assert not {name for name in hub.served if name.endswith((".bin", ".gguf", ".model"))}


def test_what_is_not_supported_is_said_before_the_weights_are_fetched(hub, folder):
    hub.add("org/new", folder)
    hub.repositories["org/new"]["config.json"] = json.dumps(tiny.hf_config("newest")).encode()
    with pytest.raises(ValueError, match="model_type is 'newest'; supported: "):
        load_model("org/new", dtype="float32")
    hub.add("org/words", folder, without={"tokenizer.json"})
    with pytest.raises(DownloadError, match=r"has tokenizer.model but no tokenizer.json, the only form that can be read"):
        load_model("org/words", dtype="float32")
    assert "model.safetensors" not in hub.served


def test_what_is_here_comes_first(hub, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(folder)
    assert load_model("org/name", dtype="float32").name == "model"
    for options, name in (({"revision": "v2"}, "revision"), ({"subfolder": "a"}, "subfolder")):
        with pytest.raises(ValueError, match=f"{name} is '.*', but 'org/name' is here; only hub ids have a {name}"):
            load_model("org/name", dtype="float32", **options)
    assert not hub.served


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"source": "smollm2-135m-instruct", "revision": "v1"}, "is the name of a model card; only hub ids have a revision"),
        ({"source": "missing.gguf", "subfolder": "a"}, r"'missing.gguf' is no hub id; only hub ids have a subfolder"),
        ({"source": "org/name", "revision": 3}, "revision is 3; it must be a branch, a tag or a commit, or None"),
        ({"source": "org/name", "subfolder": "a/../b"}, "subfolder is 'a/../b'; it must be a folder in a repository"),
        ({"source": "org/name", "subfolder": "/a"}, "subfolder is '/a'; it must be"),
    ],
)
def test_options_that_make_no_sense(hub, options, match):
    with pytest.raises(ValueError, match=match):
        load_model(**options, dtype="float32")


def test_on_the_command_line(hub, folder, capsys):
    hub.add("org/name", folder)
    hub.branches["org/name"] = ["v2"]
    options = ["--dtype", "float32", "--drafter", "none", "--max-tokens", "2", "--prompt", "w1 w2"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["generate", "--model", "org/name", "--revision", "v2", *options])
    assert "org/name" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["generate", "--model", "org/name", "--revision", "v3", *options])
    assert capsys.readouterr() == ("", "specjax: 'org/name' has no revision 'v3'\n")


def test_names_of_files():
    assert hub_module.is_hub_id("HuggingFaceTB/SmolLM2-135M")
    assert not hub_module.is_hub_id(7)
