"""Helpers by name, the toy target of the folder above, and a real tokenizer."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:2]]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer, trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"],
    )  # fmt: skip
    made.train_from_iterator(["user say hi assistant hello there"] * 4, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder
