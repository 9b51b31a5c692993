"""Views: strided, backwards, transposed, repeated, unaligned, read-only, overlapping. Right, or refused before a byte.

Every view goes through every form; what must come is what the same call on contiguous memory brings, byte for byte,
and what lies between the view's elements must stay as it was.
"""

from __future__ import annotations

from typing import NamedTuple

import forms
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

import zcomm
from zcomm.errors import BufferError

UNTOUCHED = 77.0


class View(NamedTuple):
    """A caller's array whose elements are x's, and all the memory that it is a view of."""

    array: object
    whole: object


def every_second(x):
    whole = np.full((x.size, 2), UNTOUCHED, x.dtype)
    whole[:, 1] = x
    return View(whole[:, 1], whole[:, 0])


def backwards(x):
    whole = np.full(x.size + 2, UNTOUCHED, x.dtype)
    whole[1:-1] = x[::-1]
    return View(whole[1:-1][::-1], whole[[0, -1]])


def column_major(x):
    rows = next(rows for rows in (7, 5, 3, 2, 1) if x.size % rows == 0)
    return View(np.asfortranarray(x.reshape(rows, -1)), np.empty(0))


def with_odd_ones(x):
    """Dimensions of size one, whose strides mean nothing."""
    whole = np.full((3, x.size), UNTOUCHED, x.dtype)
    whole[1] = x
    return View(whole[1:2, None, :, None][:, ::-1], whole[::2])


def field_of_a_record(x):
    records = np.zeros(x.size, [("flag", np.uint8), ("value", x.dtype)])  # packed, so elements are unaligned too
    records["value"] = x
    records["flag"] = int(UNTOUCHED)
    return View(records["value"], records["flag"])


def unaligned(x):
    memory = np.full(x.nbytes + 8, int(UNTOUCHED), np.uint8)
    inside = memory[3 : 3 + x.nbytes].view(x.dtype)
    inside[...] = x
    return View(inside, memory[[0, 1, 2, -1]])


def torch_rows(x):
    whole = torch.full((x.size, 3), UNTOUCHED)
    whole[:, 1] = torch.from_numpy(x.copy())
    return View(whole[:, 1], whole[:, ::2])


def torch_transposed(x):
    rows = next(rows for rows in (7, 5, 3, 2, 1) if x.size % rows == 0)
    return View(torch.from_numpy(x.reshape(rows, -1).copy()).t().contiguous().t(), torch.empty(0))


def torch_channels_last(x):
    rows = next(rows for rows in (6, 4, 2, 1) if x.size % rows == 0)
    image = torch.from_numpy(x.reshape(1, rows, -1, 1).copy())
    return View(image.to(memory_format=torch.channels_last), torch.empty(0))


def torch_inner_slice(x):
    whole = torch.full((x.size, 4), UNTOUCHED).reshape(x.size, 2, 2)
    whole[:, 1:, 1:] = torch.from_numpy(x.copy())[:, None, None]
    return View(whole[:, 1:, 1:], whole[:, 0])


def torch_gradient(x):
    """A leaf that requires grad, as parameters do."""
    return View(torch.from_numpy(x.copy()).requires_grad_(), torch.empty(0))


VIEWS = [
    *(every_second, backwards, column_major, with_odd_ones, field_of_a_record, unaligned),
    *(torch_rows, torch_transposed, torch_channels_last, torch_inner_slice, torch_gradient),
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("placement", ["1", "2", "2+1", "2x2"])
def test_a_view_is_what_its_copy_would_be(placement, view):
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        for name, form in forms.FORMS.items():
            for codec, asynchronous in (("raw", False), ("int4", True)):
                for n in (1, 30, 301):
                    x = oracle.values(comm.rank, n * size, np.dtype(np.float32))
                    wanted = forms.carry_out(form(comm, x, "avg", np.copy), codec=codec)
                    made = []

                    def make(values, made=made):
                        made.append((view(values), values))
                        return made[-1][0].array

                    case = form(comm, x, "avg", make)
                    between = [forms.as_array(one.whole).tobytes() for one, _ in made]
                    got = forms.carry_out(case, asynchronous, codec=codec)
                    assert got.tobytes() == wanted.tobytes(), (name, codec, n)
                    assert [forms.as_array(one.whole).tobytes() for one, _ in made] == between, (name, codec, n)

    forms.run(placement, program, check="never")


def test_inputs_may_repeat_memory_or_be_read_only():
    def program(comm):
        n = comm.size
        frozen = np.arange(n * 5, dtype=np.float32) + comm.rank
        frozen.flags.writeable = False
        repeated = np.broadcast_to(np.float32(comm.rank + 1), n * 5)
        for x in (frozen, frozen.reshape(n, 5)[:, ::-1], repeated, torch.full((1,), comm.rank + 1.0).expand(n * 5)):
            as_float = torch.as_tensor(np.array(x)) if isinstance(x, np.ndarray) else x
            out = np.empty(5 * n * n, np.float32) if isinstance(x, np.ndarray) else torch.empty(5 * n * n)
            comm.all_gather_single(out, x, "raw")
            own = forms.as_array(out)[5 * n * comm.rank : 5 * n * (comm.rank + 1)]
            assert own.tolist() == as_float.reshape(-1).tolist()
            part = out[:5]
            comm.reduce_scatter_single(part, x, "sum", "raw")
            swapped = out[: 5 * n]
            comm.all_to_all_single(swapped, x, codec="raw")
        assert (frozen == np.arange(n * 5) + comm.rank).all()

    forms.run("3", program, check="never")


def test_a_reduce_only_reads_where_it_brings_nothing():
    def program(comm):
        here = comm.rank == 1
        for make in (lambda x: np.broadcast_to(x, 6), _frozen, lambda x: torch.full((1,), float(x)).expand(6)):
            x = np.full(6, 2.0, np.float32) if here else make(np.float32(comm.rank))
            comm.reduce(x, 1, "sum", "raw")
            assert np.unique(forms.as_array(x)).tolist() == [4.0 if here else comm.rank]

    forms.run("3", program, check="never")


def _frozen(x):
    array = np.full(6, x)
    array.flags.writeable = False
    return array


def test_outputs_that_cannot_hold_a_result_are_refused_before_a_byte_moves():
    f = np.float32
    whole = np.zeros(40, f)
    outputs = {
        "read-only": _frozen(f(1)),
        "repeated": np.broadcast_to(f(1), 6),
        "repeated torch": torch.zeros(1).expand(6),
        "sliding": np.lib.stride_tricks.sliding_window_view(whole, 3, writeable=True)[:2],
        "sliding torch": torch.zeros(8).unfold(0, 3, 1)[:2],
        "stride 0 inside": torch.as_strided(torch.zeros(4), (2, 3), (1, 0)),
        "own overlap": np.lib.stride_tricks.as_strided(whole, (2, 3), (4, 4)),
    }

    def program(comm):
        before = comm._transport.wire_bytes_sent
        for name, out in outputs.items():
            numpy_like = isinstance(out, np.ndarray)
            source = np.ones(12, f) if numpy_like else torch.ones(12)
            for call in (
                lambda out=out: comm.all_reduce(out),
                lambda out=out: comm.broadcast(out, 0),
                lambda out=out, source=source: comm.all_gather_single(out, source[:3]),
                lambda out=out, source=source: comm.reduce_scatter_single(out, source),
                lambda out=out, source=source: comm.all_to_all_single(out, source[:6]),
                lambda out=out: comm.all_reduce_coalesced([out]),
                lambda out=out, source=source: comm.reduce_scatter(out, [source[:6], source[6:]]),
                lambda out=out, source=source: comm.all_gather([out, source[6:]], source[:6]),
                lambda out=out: comm.recv(out, 1 - comm.rank),
            ):
                with pytest.raises(BufferError, match=r"read-only|one\s+place"):
                    call()
                assert name
        assert comm._transport.wire_bytes_sent == before

    forms.run("2", program, check="never")


def test_inputs_and_outputs_that_overlap_are_refused_but_for_the_rank_s_own_part():
    def program(comm):
        n, rank = 10, comm.rank
        whole = np.arange(4 * n, dtype=np.float32)
        other = (rank + 1) % 2
        for call in (
            lambda: comm.all_gather_single(whole[: 2 * n], whole[n * other : n * (other + 1)]),
            lambda: comm.all_gather_single(whole[: 2 * n], whole[n * rank + 1 : n * (rank + 1) + 1]),
            lambda: comm.all_gather_single(whole[: 2 * n], whole[2 * n - 1 : 3 * n - 1]),
            lambda: comm.reduce_scatter_single(whole[n * other : n * (other + 1)], whole[: 2 * n]),
            lambda: comm.reduce_scatter_single(whole[2 * n - 1 : 3 * n - 1], whole[: 2 * n]),
            lambda: comm.all_to_all_single(whole[: 2 * n], whole[: 2 * n]),
            lambda: comm.all_to_all_single(whole[: 2 * n], whole[1 : 2 * n + 1]),
            lambda: comm.all_reduce_coalesced([whole[:n], whole[n - 1 : 2 * n]]),
        ):
            with pytest.raises(BufferError, match=r"overlap|share memory"):
                call()
        assert (whole == np.arange(4 * n)).all()
        comm.all_gather_single(whole[: 2 * n], whole[n * rank : n * (rank + 1)], "raw")
        assert (whole == np.arange(4 * n)).all()
        comm.reduce_scatter_single(whole[n * rank : n * (rank + 1)], whole[: 2 * n], "sum", "raw")
        assert (whole[n * rank : n * (rank + 1)] == 2 * (np.arange(n) + n * rank)).all()
        neighbours = np.zeros(3 * n, np.float32)  # side by side is not overlapping
        comm.all_to_all_single(neighbours[:n], neighbours[n : 2 * n], codec="raw")

    forms.run("2", program, check="never")


def test_strided_outputs_of_a_list_may_lie_among_each_other_but_not_share_an_element():
    def program(comm):
        n = 6
        x = np.full(n, comm.rank + 1.0, np.float32)
        whole = np.zeros(4 * n, np.float32)
        matrix = whole[: 2 * n].reshape(n, 2)
        for outputs in (
            [whole[: 2 * n : 2], whole[:n]],
            [whole[n : 2 * n], whole[: 2 * n : 2]],
            [matrix[:, 1], matrix[:, 1]],
            [matrix[::-1, 0], matrix[:, 0]],
            [whole[: 3 * n : 3], whole[3 : 3 + 3 * n : 3]],
        ):
            with pytest.raises(BufferError, match="share memory"):
                comm.all_gather(outputs, x, "raw")
        assert not whole.any()
        comm.all_gather([matrix[:, 0], matrix[:, 1]], x, "raw")
        assert matrix.tolist() == [[1.0, 2.0]] * n
        comm.all_gather([whole[3 * n : n : -2], whole[n + 1 : 3 * n : 2]], x, "raw")
        assert whole[n + 1 : 3 * n + 1].tolist() == [2.0, 1.0] * n

    forms.run("2", program, check="never")


def test_an_input_inside_a_strided_output_is_read_before_it_is_written():
    """The overlap check sees addresses; a strided side is a copy, so the call reads what was there when it was made."""

    def program(comm):
        size, n = comm.size, 50
        for asynchronous in (False, True):
            whole = np.zeros((size * n, 2), np.float32)
            whole[:, 0] = np.arange(size * n) + 1000 * comm.rank
            source = whole[:n, 0]  # every rank gathers into the column it reads from
            work = comm.all_gather_single(whole[:, 0], source, "raw", asynchronous)
            if asynchronous:
                work.wait()
            wanted = np.concatenate([np.arange(n) + 1000 * rank for rank in range(size)])
            assert (whole[:, 0] == wanted).all()
            assert not whole[:, 1].any()

    forms.run("3", program, check="never")


def test_arrays_that_are_not_plain_memory_are_refused_by_name():
    class Sub(torch.Tensor):
        pass

    others = {
        "memmap": np.ones(3, np.float32).view(np.memmap),
        "matrix": np.matrix([[1.0, 2.0]], np.float32),
        "MaskedArray": np.ma.masked_array(np.ones(3, np.float32), [True, False, False]),
        "Sub": torch.ones(3).as_subclass(Sub),
        "float32": np.float32(3),
        "byte order": np.ones(3, ">f4"),
        "list": [1.0, 2.0],
        "NoneType": None,
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.ones(3, 3).to_sparse(),
        "quint8": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "no memory": _freed(),
    }

    def program(comm):
        for name, array in others.items():
            for call in (
                lambda array=array: comm.all_reduce(array),
                lambda array=array: comm.all_gather_single(np.empty(6, np.float32), array),
                lambda array=array: comm.all_reduce_coalesced([np.ones(2, np.float32), array]),
                lambda array=array: comm.send(array, 1 - comm.rank),
            ):
                with pytest.raises(BufferError, match=name):
                    call()

    forms.run("2", program, check="never")


def _freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_lists_are_of_one_kind_and_one_message_of_any_dtypes():
    def program(comm):
        array, tensor = np.ones(3, np.float32), torch.ones(4)
        for mixed in ([array, tensor], [tensor, array]):
            for call in (
                lambda mixed=mixed: comm.all_reduce_coalesced(mixed),
                lambda mixed=mixed: comm.reduce_scatter(np.ones(3, np.float32), mixed),
                lambda mixed=mixed: comm.all_gather(mixed, np.ones(4, np.float32)),
                lambda mixed=mixed: comm.all_to_all([tensor, tensor.clone()], mixed),
            ):
                with pytest.raises(BufferError, match="all of one kind"):
                    call()
        outs = [torch.empty(2), torch.empty(2)]
        comm.all_gather(outs, np.full(2, comm.rank, np.float32), "raw")  # an input of another kind than the outputs
        assert [out.tolist() for out in outs] == [[0.0, 0.0], [1.0, 1.0]]
        narrow = [np.full(5, comm.rank, ml_dtypes.bfloat16), np.ones((1, 3), np.float16), np.ones((), np.float64)]
        comm.all_reduce_coalesced(narrow, "avg", "raw")
        assert [x.astype(float).reshape(-1)[0] for x in narrow] == [0.5, 1, 1]
        assert [x.dtype for x in narrow] == [ml_dtypes.bfloat16, np.float16, np.float64]

    forms.run("2", program, check="never")


# -- on gloo ----------------------------------------------------------------------------------------------------------


def check_columns_over_gloo() -> None:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    for op in ("sum", "avg"):
        whole = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3) + rank
        zcomm.all_reduce(whole[:, 1], op, codec="raw")
        wanted = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3) + rank
        total = sum(torch.arange(1, 21, 3) + r for r in range(size)).float()
        wanted[:, 1] = total if op == "sum" else total / size
        assert torch.equal(whole, wanted)
    matrix = torch.arange(4.0).reshape(2, 2) + 10 * rank
    out = torch.empty(size, 2, 2).transpose(1, 2)
    zcomm.all_gather_single(out, matrix.t(), codec="raw")
    assert torch.equal(out, torch.stack([(torch.arange(4.0).reshape(2, 2) + 10 * r).t() for r in range(size)]))
    zcomm.broadcast(matrix.t()[:, 0], 2, codec="raw")
    assert matrix[0].tolist() == [20.0, 21.0]
    assert matrix[1].tolist() == [2.0 + 10 * rank, 3.0 + 10 * rank]


def check_distributed_tensors() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for call in (
        lambda: zcomm.all_reduce(sharded, codec="raw"),
        lambda: zcomm.all_gather_single(torch.empty(32), sharded, codec="raw"),
    ):
        with pytest.raises(BufferError, match=r"pass the local tensor: \.to_local\(\)"):
            call()
    local = sharded.to_local().clone()
    zcomm.all_reduce(local, codec="raw")
    assert local.tolist() == [12.0, 16.0]


def test_a_distributed_tensor_is_refused_and_its_local_one_is_not(torch_world):
    torch_world.run(check_distributed_tensors)


def test_columns_over_gloo_are_what_gloo_itself_gets_wrong(torch_world):
    torch_world.run(check_columns_over_gloo)
