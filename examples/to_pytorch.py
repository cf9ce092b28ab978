"""Opens memory of Highwater in PyTorch: `python to_pytorch.py PATH/to_pytorch`.

Starts the Rust program `to_pytorch`, opens the tensors that it shares, compares and releases them. Then the same with a receiver
that is killed, and with a sender that is killed. Prints each check. The exit status is 1 if one failed.
"""

import glob
import os
import sys

import torch

from torch_storages import TENSORS, Checks, Program, count_of, free_bytes, size, to_fields, to_text


def open_tensor(fields):
    """A tensor over the memory of a share. It is released when the tensor is deleted."""
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.float32, device="cuda").set_(storage, 0, (fields[2] // 4,), (1,))


def values(tensors):
    """Size, smallest and largest value of each tensor."""
    return [(tensor.numel(), tensor.min().item(), tensor.max().item()) for tensor in tensors]


EXPECTED = [(size(at), float(at), float(at)) for at in range(TENSORS)]


def receive(sender, process):
    """Requests the tensors for a process. Returns their fields."""
    sender.write(process, TENSORS)
    return [to_fields(sender.read("tensor")[0]) for _ in range(TENSORS)]


def check_end(checks, sender):
    """Checks what a sender reports after its last share."""
    ended, left, blocks, took = map(int, sender.read("ended"))
    checks.equal("shares that the sender has left", (ended, left), (1, 0))
    checks.equal("blocks of memory that the sender has left", blocks, 0)
    checks.note(f"the last share ended {took / 1000:.1f} ms after it was asked for")
    checks.equal("objects that the sender has left at its end", sender.read("closed"), ["0"])
    checks.equal("exit status of the sender", sender.ends(), 0)


def be_killed():
    """The receiver that is killed: opens what it reads, and waits."""
    torch.cuda.init()
    values([torch.ones(10, device="cuda")])
    print("ready", flush=True)
    tensors = [open_tensor(to_fields(sys.stdin.readline().strip())) for _ in range(TENSORS)]
    print("opened", int(values(tensors) == EXPECTED), flush=True)
    sys.stdin.readline()


def main():
    program = sys.argv[1]
    torch.cuda.init()
    checks = Checks("Highwater to PyTorch")
    # The driver keeps some memory for the kernels.
    values([torch.ones(10, device="cuda")])
    killed = Program(sys.executable, os.path.abspath(__file__), "--be-killed")
    killed.read("ready")
    before = free_bytes()

    sender = Program(program)
    fields = receive(sender, os.getpid())
    checks.note(f"the sender took {int(sender.read('shared')[1]) / TENSORS:.1f} us to fill and share a tensor")
    checks.note(f"the first share: {fields[0]}")
    tensors = [open_tensor(each) for each in fields]
    checks.all_equal("tensors with the right values", values(tensors), EXPECTED)
    checks.all_equal("counts while they are open", map(count_of, fields), [1] * TENSORS)
    del tensors
    free_bytes()
    # The file has the counts until the sender ends.
    checks.all_equal("counts after the release", map(count_of, fields), [0] * TENSORS)
    sender.write("0")
    check_end(checks, sender)
    checks.equal("file of the counters", count_of(fields[0]), None)
    checks.returned(before)

    print("-- the receiver is killed", flush=True)
    sender = Program(program)
    lines = receive(sender, killed.process.pid)
    sender.read("shared")
    killed.write(*map(to_text, lines))
    checks.equal("tensors with the right values in the receiver", killed.read("opened"), ["1"])
    killed.kill()
    sender.write("0")
    check_end(checks, sender)
    checks.returned(before)

    print("-- the sender is killed", flush=True)
    before = free_bytes()
    sender = Program(program)
    fields = receive(sender, os.getpid())
    sender.read("shared")
    tensors = [open_tensor(each) for each in fields]
    torch.cuda.synchronize()
    sender.kill()
    checks.all_equal("tensors that still have the right values", values(tensors), EXPECTED)
    del tensors
    free_bytes()
    checks.all_equal("counts after the release", map(count_of, fields), [0] * TENSORS)
    checks.returned(before)
    # The next sender removes the file.
    sender = Program(program)
    sender.write(os.getpid(), 1)
    tensor = open_tensor(to_fields(sender.read("tensor")[0]))
    sender.read("shared")
    del tensor
    sender.write("0")
    check_end(checks, sender)
    checks.equal("files of counters that are left", glob.glob("/dev/shm/highwater_torch_*"), [])
    checks.end()


if __name__ == "__main__":
    be_killed() if sys.argv[1:] == ["--be-killed"] else main()
