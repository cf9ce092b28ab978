"""What `to_pytorch.py` and `from_pytorch.py` share: the text of a storage, processes, and checks that print all they see."""

import gc
import mmap
import os
import struct
import subprocess
import sys
import time

import torch

TENSORS = int(os.environ.get("TENSORS", "1000"))


def to_text(fields):
    """The result of `storage._share_cuda_()` as text, for `highwater_pytorch::TorchStorage`."""
    return ":".join(field.hex() if isinstance(field, bytes) else str(int(field)) for field in fields)


def to_fields(text):
    """The arguments of `torch.UntypedStorage._new_shared_cuda`, from the text of a `highwater_pytorch::TorchStorage`."""
    device, handle, size, offset, file, slot, event, waits = text.split(":")
    from_hex = bytes.fromhex
    return int(device), from_hex(handle), int(size), int(offset), from_hex(file), int(slot), from_hex(event), waits == "1"


def size(at):
    """The number of values of a tensor. Each value is the tensor's number."""
    return 1 + at * 97 % (1 << 16)


BYTES = sum(4 * size(at) for at in range(TENSORS))


def count_of(fields):
    """The counter of a share, or None if its file is gone."""
    try:
        with open("/dev/shm" + fields[4].decode(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return struct.unpack_from("<q", view, 64 + 8 * fields[5])[0]
    except FileNotFoundError:
        return None


def free_bytes():
    """Free memory of the device, after everything cached is given back."""
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def wait_until(is_so, seconds=10.0):
    """Waits, and returns the seconds that it took, or None after `seconds`."""
    started = time.monotonic()
    while not is_so():
        if time.monotonic() - started > seconds:
            return None
        time.sleep(0.001)
    return time.monotonic() - started


class Program:
    """Another process, with lines in both directions. Its errors go to ours."""

    def __init__(self, *command):
        self.name = os.path.basename(command[0] if command[0] != sys.executable else command[1])
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(self, *lines):
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()

    def read(self, word):
        """The rest of the next line, which has to begin with `word`."""
        line = self.process.stdout.readline()
        if not line.startswith(word):
            status = self.process.poll()
            sys.exit(f"FAILED: {self.name} wrote {line!r}, expected `{word} ...`; its exit status is {status}")
        return line.split()[1:]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def ends(self):
        """The exit status, after the process has ended by itself."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        return self.process.wait(timeout=20)


class Checks:
    """Prints each check, and remembers whether one failed."""

    def __init__(self, title):
        self.failed = 0
        print(f"== {title}: PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, process {os.getpid()}", flush=True)

    def equal(self, what, found, expected):
        if found == expected:
            print(f"   ok      {what}: {found}", flush=True)
        else:
            self.failed += 1
            print(f"   FAILED  {what}: {found!r}, expected {expected!r}", flush=True)

    def note(self, what):
        print(f"           {what}", flush=True)

    def all_equal(self, what, found, expected):
        """Compares lists, and prints the first differences."""
        found, expected = list(found), list(expected)
        wrong = [at for at in range(max(len(found), len(expected))) if found[at : at + 1] != expected[at : at + 1]]
        if not wrong:
            print(f"   ok      {what}: {len(found)} of {len(expected)}", flush=True)
            return
        self.failed += 1
        print(f"   FAILED  {what}: {len(wrong)} of {len(expected)} differ; {len(found)} found", flush=True)
        for at in wrong[:5]:
            print(f"           at {at}: {found[at : at + 1]}, expected {expected[at : at + 1]}", flush=True)

    def returned(self, before):
        """Checks that the device has its memory back. The driver may keep some for itself, less than a tenth of the tensors."""
        took = wait_until(lambda: free_bytes() >= before, 2)
        kept = 0 if took is not None else before - free_bytes()
        self.equal(f"the device has the tensors' {BYTES} bytes back, except {kept}", kept < BYTES // 10, True)

    def end(self):
        print(f"== {'FAILED, ' + str(self.failed) + ' checks' if self.failed else 'passed'}", flush=True)
        sys.exit(1 if self.failed else 0)
