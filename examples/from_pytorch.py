"""Opens tensors of PyTorch in Highwater: `python from_pytorch.py PATH/from_pytorch`.

Shares tensors with the Rust program `from_pytorch`, which compares and releases them. Then the same with a receiver that is
killed, and with a sender that is killed. Prints each check. The exit status is 1 if one failed.

With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, the tensors lie in expandable segments. The receiver then copies descriptors
of this process, which needs the permission to trace it. `let_others_trace` gives that where the system asks for it.
"""

import ctypes

import os
import sys

import torch

from torch_storages import TENSORS, Checks, Program, count_of, free_bytes, size, to_text, wait_until


EXPECTED = [[str(at), str(size(at)), str(at), "1"] for at in range(TENSORS)]


EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def let_others_trace():
    """Lets other processes of this user copy descriptors, where Yama restricts it. Elsewhere, the call changes nothing."""
    pr_set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(pr_set_ptracer, any_process, 0, 0, 0)


def share():
    """Makes tensors, and returns them with the fields of each share."""
    tensors = [torch.full((size(at),), float(at), device="cuda") for at in range(TENSORS)]
    return tensors, [tensor.untyped_storage()._share_cuda_() for tensor in tensors]


def compare(checks, receiver, what):
    receiver.write("compare")
    checks.all_equal(what, [receiver.read("values") for _ in range(TENSORS)], EXPECTED)


def be_killed():
    """The sender that is killed: shares, and waits."""
    torch.cuda.init()
    let_others_trace()
    tensors, shares = share()
    print("".join(f"tensor {to_text(each)}\n" for each in shares), end="", flush=True)
    sys.stdin.readline()
    del tensors


def main():
    program = sys.argv[1]
    torch.cuda.init()
    let_others_trace()
    checks = Checks(f"PyTorch to Highwater{', from expandable segments' if EXPANDABLE else ''}")
    # The driver keeps some memory for the kernels.
    tensor = torch.full((10,), 1.0, device="cuda")
    tensor.min().item(), tensor.max().item()
    del tensor
    killed = Program(sys.executable, os.path.abspath(__file__), "--be-killed")
    lines = [killed.read("tensor")[0] for _ in range(TENSORS)]
    before, allocated = free_bytes(), torch.cuda.memory_allocated()

    tensors, shares = share()
    checks.note(f"the first share: {shares[0]}")
    kinds = sorted({bytes(each[1][1:2]) for each in shares})
    checks.equal("types of the handles", kinds, [b"e" if EXPANDABLE else b"c"])
    versions, handles = sorted({each[1][0] for each in shares}), {each[1] for each in shares}
    checks.note(f"versions of the handles: {versions}, different handles: {len(handles)}")
    checks.note(f"shares with an event: {sum(each[7] for each in shares)} of {TENSORS}")
    receiver = Program(program)
    receiver.write(TENSORS, *map(to_text, shares))
    opened, took = map(int, receiver.read("opened"))
    checks.equal("tensors that opened", opened, TENSORS)
    checks.note(f"an open took {took / TENSORS:.1f} us")
    compare(checks, receiver, "tensors with the right values")
    checks.all_equal("counts while they are open", map(count_of, shares), [1] * TENSORS)
    receiver.write("write")
    receiver.read("written")
    seen = [(tensor.min().item(), tensor.max().item()) for tensor in tensors]
    checks.all_equal("tensors in which PyTorch sees what Highwater wrote", seen, [(-1.0, -1.0)] * TENSORS)
    del tensors
    free_bytes()
    receiver.write("release")
    receiver.read("released")
    took = wait_until(lambda: all(count_of(each) == 0 for each in shares))
    checks.all_equal("counts after the release", map(count_of, shares), [0] * TENSORS)
    checks.note(f"within {(took or 0) * 1000:.1f} ms")
    free_bytes()
    checks.equal("bytes that did not return to PyTorch", torch.cuda.memory_allocated() - allocated, 0)
    receiver.write("end")
    checks.equal("objects that Highwater has left", receiver.read("closed"), ["0"])
    checks.equal("exit status of the receiver", receiver.ends(), 0)
    checks.returned(before)

    print("-- the receiver is killed", flush=True)
    tensors, shares = share()
    receiver = Program(program)
    receiver.write(TENSORS, *map(to_text, shares))
    receiver.read("opened")
    compare(checks, receiver, "tensors with the right values")
    receiver.kill()
    del tensors
    free_bytes()
    # The format cannot tell the death. The sender's program knows of it.
    checks.all_equal("counts after the death", map(count_of, shares), [1] * TENSORS)
    checks.note(f"bytes that PyTorch keeps for the dead receiver: {torch.cuda.memory_allocated() - allocated}")
    for each in shares:
        torch.UntypedStorage._release_ipc_counter_cuda(each[4], each[5])
    free_bytes()
    checks.equal("bytes that PyTorch keeps after `_release_ipc_counter_cuda`", torch.cuda.memory_allocated() - allocated, 0)
    checks.returned(before)

    print("-- the sender is killed", flush=True)
    receiver = Program(program)
    receiver.write(TENSORS, *lines)
    receiver.read("opened")
    killed.kill()
    compare(checks, receiver, "tensors that still have the right values")
    receiver.write("release")
    receiver.read("released")
    receiver.write("end")
    checks.equal("objects that Highwater has left", receiver.read("closed"), ["0"])
    checks.equal("exit status of the receiver", receiver.ends(), 0)
    checks.returned(before)
    # PyTorch leaves the file of a process that was killed.
    file = "/dev/shm" + bytes.fromhex(lines[0].split(":")[4]).decode()
    if os.path.exists(file):
        os.remove(file)
    checks.end()


if __name__ == "__main__":
    be_killed() if sys.argv[1:] == ["--be-killed"] else main()
