"""Make tokenizer.json: a byte-level BPE of exactly as many ids as this checkpoint's vocabulary has.

256 bytes, merges learnt from the project's licence text, then the special tokens at the ids that config.json names.
The same text always gives the same file. Needs the `tokenizers` package (`pip install -e '.[hf]'`).
"""

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).resolve().parent
LICENCE = HERE.parents[2] / "LICENSE"


def make_tokenizer(config: dict[str, int], text: str) -> Tokenizer:
    """A tokenizer learnt from `text`. Every byte has a token, so any text survives a round trip.

    Raises ValueError if the special ids of `config` are not the last ones of its vocabulary.
    """
    specials = {
        config["bos_token_id"]: "<|startoftext|>",
        config["pad_token_id"]: "<|pad|>",
        config["eos_token_id"]: "<|return|>",
    }
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config["vocab_size"] - len(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    # Added after training: the trainer would give them the first ids.
    tokenizer.add_special_tokens([specials[token_id] for token_id in sorted(specials)])
    got = {tokenizer.token_to_id(token): token for token in specials.values()}
    if got != specials or tokenizer.get_vocab_size() != config["vocab_size"]:
        raise ValueError(
            f"special tokens are at {got}, config.json (vocab_size={config['vocab_size']}) wants {specials}"
        )
    return tokenizer


if __name__ == "__main__":
    config = json.loads((HERE / "config.json").read_text())
    make_tokenizer(config, LICENCE.read_text()).save(str(HERE / "tokenizer.json"))
