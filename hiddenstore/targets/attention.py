"""Which of torch's attention kernels run where every text has a length of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hiddenstore.threads import Lock

_lock = Lock()
_inside = 0
_was_enabled = True


@contextmanager
def any_length() -> Iterator[None]:
    """Inside, attention on a GPU is flash or memory-efficient. cuDNN's makes a plan for each shape that it has not
    seen, in tens of milliseconds (H200, torch 2.11): a batch of texts, or one more token of an answer, is always new.
    On a CPU nothing changes. Many threads may be inside: torch's switch is one for the process."""
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                torch.backends.cuda.enable_cudnn_sdp(_was_enabled)
