"""Memory of packs is used again, and never while somebody still looks at it."""

import gc
import random
from collections import deque

import torch

from hiddenstore.data.packed import PAGE_BYTES, Buffers, apart, room_bytes


def test_memory_comes_back_once_the_last_tensor_over_it_is_gone() -> None:
    buffers = Buffers(1 << 20)
    lent = buffers.take(1000)
    address, view = lent.data_ptr(), lent[100:200].view(torch.bfloat16).reshape(2, 25)
    assert address % PAGE_BYTES == 0
    del lent
    gc.collect()
    view.fill_(3.0)
    other = buffers.take(1000)
    other.fill_(0)
    assert other.data_ptr() != address
    assert (view == 3.0).all()
    del view
    gc.collect()
    assert buffers.take(900).data_ptr() == address


def test_memory_comes_back_once_the_last_carved_tensor_is_gone() -> None:
    buffers, members = Buffers(1 << 20), {"ids": ((9,), torch.int64), "flags": ((9,), torch.bool)}
    tensors = apart(buffers.take(room_bytes(members)), members)
    address, flags = tensors["ids"].data_ptr(), tensors.pop("flags").view(3, 3)
    del tensors
    gc.collect()
    other = buffers.take(room_bytes(members))
    assert other.data_ptr() != address
    assert flags.untyped_storage().nbytes() == 9
    del flags
    gc.collect()
    assert buffers.take(room_bytes(members)).data_ptr() == address


def test_memory_that_does_not_fit_the_limit_is_let_go() -> None:
    buffers = Buffers(10 * PAGE_BYTES)
    small = [buffers.take(PAGE_BYTES) for _ in range(3)]
    addresses = {tensor.data_ptr() for tensor in small}
    del small
    large = buffers.take(9 * PAGE_BYTES)
    assert large.shape == (9 * PAGE_BYTES,)
    assert buffers._total <= 10 * PAGE_BYTES
    assert buffers._free == []
    assert len(addresses) == 3


def test_packs_of_any_lengths_take_the_memory_of_as_many_of_the_longest() -> None:
    buffers, generator = Buffers(1 << 30), random.Random(0)
    most, ahead = 40 * PAGE_BYTES, deque[torch.Tensor](maxlen=8)
    for _ in range(500):
        ahead.append(buffers.take(generator.randint(10 * PAGE_BYTES, most)))
    assert buffers._total <= 10 * (most + most // 16 + PAGE_BYTES)


def test_carved_tensors_lie_apart_and_hold_what_they_were_given() -> None:
    members = {
        "bits": ((3, 5), torch.bfloat16),
        "nothing": ((0, 7), torch.int64),
        "flags": ((9,), torch.bool),
        "ids": ((2, 2), torch.int64),
    }
    tensors = apart(Buffers(1 << 20).take(room_bytes(members)), members)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == members
    assert all(t.data_ptr() % 64 == 0 for t in tensors.values() if t.numel())
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    assert [bool((t == n).all()) for n, t in enumerate(tensors.values()) if n != 2] == [True, True, True]
    assert bool(tensors["flags"].all())
