import numpy as np
import pytest

from specjax.training.texts import Texts

TEXTS = Texts.of_rows([[1, 2, 3], [1, 2, 9, 9], [5], [7, 8, 1, 1]], prompt_lengths=[2, 2, 0, 3])


def test_rows_prompts_and_lengths():
    assert [TEXTS.row(index).tolist() for index in range(4)] == [[1, 2, 3], [1, 2, 9, 9], [5], [7, 8, 1, 1]]
    assert [TEXTS.prompt(index).tolist() for index in range(4)] == [[1, 2], [1, 2], [], [7, 8, 1]]
    assert TEXTS.lengths.tolist() == [3, 4, 1, 4]
    joined = Texts.join([TEXTS.select([2]), TEXTS.select([3, 0])])
    assert [joined.row(index).tolist() for index in range(3)] == [[5], [7, 8, 1, 1], [1, 2, 3]]
    assert joined.prompt_lengths.tolist() == [0, 3, 2]


def test_a_split_keeps_the_rows_of_a_prompt_together():
    for seed in range(20):
        first, second = TEXTS.split(0.34, seed)
        assert len(first) + len(second) == 4
        prompts = [{part.prompt(index).tobytes() for index in range(len(part))} for part in (first, second)]
        assert not prompts[0] & prompts[1]
    assert len(TEXTS.split(0)[1]) == 0


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "texts.npz"
    TEXTS.save(path)
    loaded = Texts.load(path)
    assert loaded.digest() == TEXTS.digest()
    assert loaded.digest() != TEXTS.select([0, 1, 2]).digest()
    assert [entry.name for entry in tmp_path.iterdir()] == ["texts.npz"]


def test_bad_files_and_arrays(tmp_path):
    with pytest.raises(ValueError, match=r"none.npz: there is no such file"):
        Texts.load(tmp_path / "none.npz")
    cut = tmp_path / "cut.npz"
    TEXTS.save(cut)
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cut.npz: no NumPy archive, or a damaged one"):
        Texts.load(cut)
    np.savez(tmp_path / "other.npz", tokens=np.array([1]), offsets=np.array([0, 1]))
    with pytest.raises(ValueError, match=r"other.npz: no array is called 'prompt_lengths'"):
        Texts.load(tmp_path / "other.npz")
    for arrays, message in (
        ((np.array([1, 2]), np.array([0, 1]), np.array([0])), "offsets must run from 0 to the 2 tokens"),
        ((np.array([1.0]), np.array([0, 1]), np.array([0])), "tokens are float64"),
        ((np.array([1]), np.array([0, 1, 1]), np.array([0, 0])), "row 1 is empty"),
        ((np.array([1]), np.array([0, 1]), np.array([2])), "prompt_lengths must hold"),
    ):
        with pytest.raises(ValueError, match=message):
            Texts(*arrays)
    with pytest.raises(ValueError, match=r"share is 2; it must be from 0 to 1"):
        TEXTS.split(2)
