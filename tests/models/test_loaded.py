import jax
import pytest

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.loaded import Model
from tests.checkpoints import tiny

CONFIG = DecoderConfig(
    vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4, mlp_width=16, max_positions=32
)
DECODER = Decoder(CONFIG)
PARAMS = DECODER.init(jax.random.key(0), dtype="bfloat16")


def model(**changes):
    return Model(**{"functions": DECODER, "params": PARAMS, "vocab_size": 10, "max_positions": 32} | changes)


def test_without_tokenizer():
    one = model()
    assert (one.config, one.dtype.name, one.tokenizer, one.stop_token_ids) == (CONFIG, "bfloat16", None, ())
    assert model(stop_token_ids=[3, 9]).stop_token_ids == (3, 9)


def test_functions_without_a_configuration():
    class Functions:
        pass

    assert model(functions=Functions()).config is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be an integer of at least 1"),
        ({"max_positions": 1.5}, "max_positions is 1.5"),
        ({"stop_token_ids": (10,)}, "stop_token_ids holds 10; ids are integers from 0 to 9"),
        ({"tokenizer": Tokenizer(tiny.word_tokenizer(["a", "b"]))}, "vocab_size is 10; it must be the tokenizer's size, 2"),
    ],
)
def test_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        model(**changes)
