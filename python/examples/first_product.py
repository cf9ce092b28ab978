"""Multiplies two matrices on the best device of this machine, or on the mock, which needs no GPU."""

import highwater

with highwater.open("auto", fallback="mock") as runtime:
    device = runtime.device(0)
    stream = device.create_stream()
    a = stream.upload([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = stream.upload([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    print(f"on {device.name}:")
    print(stream.download(stream.matmul(a, b)))
