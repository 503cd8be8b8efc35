"""Writes text and a tokenizer for a few steps of TorchTitan, so that a probe downloads nothing.

TorchTitan ships neither.

Every document is one training sample: `seq_len` words and an end mark, so that no attention mask
cuts a sequence in two.
Sources: torchtitan 0.2.2 and 0.3.0 hf_datasets/text_datasets.py (data set `c4_test`: a folder that
`datasets` reads), components/tokenizer.py (tokenizer.json, tokenizer_config.json).
"""

import json
import random
import string

ASSETS, DATA = "assets", "data"
WORDS = string.ascii_letters + string.digits
END = "<end>"
MIN_VOCAB = len(WORDS) + 1


def data_files(seq_len: int, documents: int, seed: int) -> dict[str, str]:
    """Files of a tokenizer and of `documents` documents; each data-parallel rank needs one."""
    return {
        f"{ASSETS}/tokenizer.json": json.dumps(_tokenizer()),
        f"{ASSETS}/tokenizer_config.json": json.dumps(
            {"eos_token": END, "add_bos_token": False, "add_eos_token": True}
        ),
        f"{DATA}/train.jsonl": "".join(_documents(seq_len, documents, random.Random(seed))),
    }


def _tokenizer() -> dict[str, object]:
    vocabulary = {word: index for index, word in enumerate([*WORDS, END])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": WORDS[0]},
    }


def _documents(seq_len: int, documents: int, source: random.Random) -> list[str]:
    """Lines of {"text": words}.

    Documents are rotations of one random text, so that many long ones are cheap to write.
    """
    base = "".join(source.choices(WORDS, k=seq_len))
    turns = [source.randrange(seq_len) for _ in range(documents)]
    return [json.dumps({"text": " ".join(base[turn:] + base[:turn])}) + "\n" for turn in turns]
