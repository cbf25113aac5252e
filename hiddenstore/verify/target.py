"""Are the files of ``target/`` those of the target that the capture names?"""

from difflib import SequenceMatcher
from statistics import median
from typing import Any

import numpy as np

from hiddenstore import layout
from hiddenstore.damage import DAMAGE, raise_refusal, twice
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import tokenizer_rules_sha256, tokenizer_sha256, weights_sha256
from hiddenstore.verify.report import Finding, Report

RETOKENISED_TOKENS = 512
RETOKENISED_SHARE = 0.6
_RULES_FILE = "tokenizer.json"
_TOKENIZER_FILES = (_RULES_FILE, "tokenizer.model", "vocab.json")


def load_head(store: Store, report: Report) -> HeadBundle | None:
    """The head bundle, checked against the fingerprint of the target; None (and a finding) when it cannot be used."""
    try:
        head = twice(store.fs, store.head, layout.HEAD_PATH)
    except DAMAGE as error:
        report.findings.append(Finding.of(error, layout.HEAD_PATH))
        return None
    digest = weights_sha256(head.embed_tokens, head.norm_weight, head.lm_head)
    expected = store.capture.target.weights_sha256
    if digest != expected:
        detail = f"embeddings, norm and LM head have sha256 {digest[:12]}…, the capture names {expected[:12]}…"
        report.findings.append(Finding("head-mismatch", layout.HEAD_PATH, (), detail))
    return head


def load_tokenizer(store: Store, report: Report) -> Any:
    """The tokenizer of ``target/``, checked against the fingerprint of the target; None when there is none."""
    if all(store.fs.size(f"{layout.TARGET_DIR}/{name}") is None for name in _TOKENIZER_FILES):
        detail = "target/ holds no tokenizer: whether the tokens are its own was not checked"
        report.notes.append(Finding("tokenizer-absent", layout.TARGET_DIR, (), detail))
        return None
    from transformers import AutoTokenizer

    try:
        with store.fs.local_copy(layout.TARGET_DIR, without=".safetensors") as folder:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise_refusal(error, f"{store.path}/{layout.TARGET_DIR}")
        report.findings.append(Finding("tokenizer-unreadable", layout.TARGET_DIR, (), str(error)))
        return None
    target, file = store.capture.target, folder / _RULES_FILE
    digest, expected = tokenizer_sha256(tokenizer), target.tokenizer_sha256
    if digest == expected and target.tokenizer_rules_sha256 is not None and file.is_file():
        digest, expected = tokenizer_rules_sha256(file.read_bytes()), target.tokenizer_rules_sha256
    if digest != expected:
        detail = f"the tokenizer of target/ has sha256 {digest[:12]}…, the capture names {expected[:12]}…"
        report.findings.append(Finding("tokenizer", layout.TARGET_DIR, (), detail))
    return tokenizer


def retokenised_share(tokenizer: Any, samples: list[np.ndarray]) -> float:
    """Median share of a sample's tokens that come back when its text is tokenised again.

    Near 1 for text that this tokenizer cut; foreign ids spell another text, or spell it in other pieces.
    """
    shares = []
    for input_ids in samples:
        ids = input_ids[:RETOKENISED_TOKENS].tolist()
        again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
        shares.append(SequenceMatcher(None, ids, again, autojunk=False).ratio())
    return median(shares)
