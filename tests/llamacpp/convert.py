"""Runs llama.cpp's own converter: ``convert.py SOURCE PRE [WORDS…]``.

It knows how a tokenizer splits text by a hash over many words, which the bundled target's is not among: ``PRE`` says it
(``-``: as the converter finds). It looks first for a file of sentencepiece's, which these targets lack, and imports
that package to do so: here it finds none.
"""

import runpy
import sys
from pathlib import Path


def main(source: str, pre: str, *words: str) -> None:
    """Convert, as the script does when it is called with ``words``."""
    sys.path[:0] = [str(Path(source, "gguf-py")), source]
    from conversion.base import TextModel

    def no_sentencepiece(self):
        raise FileNotFoundError

    TextModel._create_vocab_sentencepiece = no_sentencepiece
    if pre != "-":
        TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    script = str(Path(source, "convert_hf_to_gguf.py"))
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
