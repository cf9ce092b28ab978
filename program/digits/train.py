#!/usr/bin/env python3
"""Train the digits MLP and write weights.safetensors and test.safetensors.

The images are the 1,797 8x8 handwritten digits that ship inside the
scikit-learn wheel. Only the data file is read; scikit-learn is not imported.

Set up and run (any directory; the two files are written next to this script):

    python3 -m venv venv
    venv/bin/pip install numpy safetensors
    venv/bin/python train.py                  # fetches the wheel with pip
    venv/bin/python train.py --wheel FILE     # uses a wheel you already have

The run is deterministic: twice on one machine gives byte-identical files.
"""

import argparse
import gzip
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# One BLAS thread, set before numpy loads: a fixed summation order makes the
# weights reproducible, and the matrices are too small to gain from more.
for _var in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_var] = "1"

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save

SKLEARN_VERSION = "1.9.1"
CSV_IN_WHEEL = "sklearn/datasets/data/digits.csv.gz"
CSV_GZ_SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"

SOURCE = (
    "UCI Machine Learning Repository, Optical Recognition of Handwritten Digits "
    "(E. Alpaydin, C. Kaynak, 1998), https://doi.org/10.24432/C50P49, "
    f"as redistributed in scikit-learn {SKLEARN_VERSION}"
)
LICENCE = "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/"

N_IMAGES, N_TEST, N_HOLDOUT = 1797, 540, 257
SIZES = (64, 128, 64, 10)
SPLIT_SEED = 20240
TRAIN_SEED = 1

# Chosen by 5-fold cross-validation inside the 1,257 training images.
EPOCHS = 150
BATCH = 32
LEARNING_RATE = 8e-3
WEIGHT_DECAY = 0.1
SHIFT_PROBABILITY = 0.3


def fetch_wheel(folder):
    """Download the pinned scikit-learn wheel into folder and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--only-binary=:all:", "--dest", str(folder),
               f"scikit-learn=={SKLEARN_VERSION}"]
    subprocess.run(command, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def read_digits(wheel):
    """Return (images u8 [1797, 64], labels u8 [1797]) from the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read(CSV_IN_WHEEL)
    if hashlib.sha256(packed).hexdigest() != CSV_GZ_SHA256:
        raise SystemExit(f"{CSV_IN_WHEEL} differs from scikit-learn {SKLEARN_VERSION}")
    lines = gzip.decompress(packed).decode("ascii").splitlines()
    table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    assert table.shape == (N_IMAGES, 65) and table[:, :64].max() == 16
    return table[:, :64].copy(), table[:, 64].copy()


def split(images, labels):
    """Shuffle with a fixed seed; return (train, test) pairs of images, labels."""
    # RandomState's streams are frozen, so the split is the same everywhere.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(images))
    test, train = order[:N_TEST], order[N_TEST:]
    return (images[train], labels[train]), (images[test], labels[test])


def scale(images):
    return images.astype(np.float32) / np.float32(16)


def shift_some(batch, rng):
    """Move a random share of the images by -1, 0 or +1 pixels each way."""
    size = len(batch)
    padded = np.zeros((size, 10, 10), np.float32)
    padded[:, 1:9, 1:9] = batch.reshape(size, 8, 8)
    moved = rng.random_sample((size, 1)) < SHIFT_PROBABILITY
    top_left = np.where(moved, rng.randint(0, 3, (size, 2)), 1)
    pixel = np.arange(8)
    rows = top_left[:, 0, None, None] + pixel[:, None]
    columns = top_left[:, 1, None, None] + pixel
    return padded[np.arange(size)[:, None, None], rows, columns].reshape(size, 64)


def forward(params, x):
    """Return the input of every layer, then the logits."""
    values = [x]
    last = len(SIZES) - 2
    for layer in range(last + 1):
        z = values[-1] @ params[f"layer{layer}.weight"] + params[f"layer{layer}.bias"]
        values.append(np.maximum(z, 0) if layer < last else z)
    return values


def gradients(params, x, labels):
    """Gradients of the mean softmax cross-entropy over the batch."""
    values = forward(params, x)
    logits = values.pop()
    delta = np.exp(logits - logits.max(axis=1, keepdims=True))
    delta /= delta.sum(axis=1, keepdims=True)
    delta[np.arange(len(x)), labels] -= 1
    delta /= np.float32(len(x))
    grads = {}
    for layer in reversed(range(len(SIZES) - 1)):
        grads[f"layer{layer}.weight"] = values[layer].T @ delta
        grads[f"layer{layer}.bias"] = delta.sum(axis=0)
        if layer:
            delta = (delta @ params[f"layer{layer}.weight"].T) * (values[layer] > 0)
    return grads


def train(images, labels, seed=TRAIN_SEED):
    """Train with Adam, a cosine learning rate and decoupled weight decay."""
    rng = np.random.RandomState(seed)
    params = {}
    for layer, (n_in, n_out) in enumerate(zip(SIZES, SIZES[1:])):
        weight = rng.standard_normal((n_in, n_out)) * np.sqrt(2 / n_in)
        params[f"layer{layer}.weight"] = weight.astype(np.float32)
        params[f"layer{layer}.bias"] = np.zeros(n_out, np.float32)
    mean = {name: np.zeros_like(p) for name, p in params.items()}
    square = {name: np.zeros_like(p) for name, p in params.items()}

    x = scale(images)
    steps = EPOCHS * (len(x) // BATCH)
    step = 0
    for _ in range(EPOCHS):
        order = rng.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            pick = order[start:start + BATCH]
            grads = gradients(params, shift_some(x[pick], rng), labels[pick])
            rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
            step += 1
            # Python floats keep the float32 arrays in float32.
            rate, fix1, fix2 = float(rate), 1 - 0.9**step, 1 - 0.999**step
            for name, p in params.items():
                g = grads[name]
                mean[name] += 0.1 * (g - mean[name])
                square[name] += 0.001 * (g * g - square[name])
                update = (mean[name] / fix1) / (np.sqrt(square[name] / fix2) + 1e-8)
                if name.endswith("weight"):
                    update += WEIGHT_DECAY * p
                p -= rate * update
    return params


def accuracy(params, images, labels):
    return float((forward(params, scale(images))[-1].argmax(axis=1) == labels).mean())


def write_tensors(path, tensors, metadata):
    """Write a safetensors file whose bytes depend only on its content."""
    # The library writes metadata in a random order; sort the header's keys.
    data = save(tensors, metadata=metadata)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8:8 + size]), sort_keys=True,
                        separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size:])


def read_back(path, tensors, metadata):
    """Load the file again and check it holds exactly what was written."""
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys(), path
    for name, want in tensors.items():
        assert loaded[name].dtype == want.dtype, name
        assert np.array_equal(loaded[name], want), name
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == metadata, path
    return loaded


def main():
    parser = argparse.ArgumentParser(description="Train the digits example MLP.")
    parser.add_argument("--wheel", type=Path, metavar="FILE",
                        help=f"a scikit-learn {SKLEARN_VERSION} wheel (default: fetch it with pip)")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        default=Path(__file__).resolve().parent,
                        help="where to write the files (default: next to this script)")
    args = parser.parse_args()

    if args.wheel:
        images, labels = read_digits(args.wheel)
    else:
        with tempfile.TemporaryDirectory() as folder:
            images, labels = read_digits(fetch_wheel(folder))
    (train_x, train_y), (test_x, test_y) = split(images, labels)

    # First without the hold-out images, to report an estimate that the test
    # set has no part in; then on all training images, for the written weights.
    fit_x, fit_y = train_x[N_HOLDOUT:], train_y[N_HOLDOUT:]
    held_x, held_y = train_x[:N_HOLDOUT], train_y[:N_HOLDOUT]
    trial = train(fit_x, fit_y)
    print(f"trial run, trained on {len(fit_x)} images:")
    print(f"  train accuracy    {accuracy(trial, fit_x, fit_y):.4f}")
    print(f"  hold-out accuracy {accuracy(trial, held_x, held_y):.4f} ({len(held_x)} images)")

    params = train(train_x, train_y)
    test_accuracy = accuracy(params, test_x, test_y)
    print(f"final run, trained on {len(train_x)} images:")
    print(f"  train accuracy    {accuracy(params, train_x, train_y):.4f}")
    print(f"  test accuracy     {test_accuracy:.4f} ({len(test_x)} images)")

    weights_path = args.out / "weights.safetensors"
    weights_meta = {
        "source": f"MLP trained by train.py on images from {SOURCE}",
        "licence": LICENCE,
        "test_accuracy": f"{test_accuracy:.4f}",
        "train_seed": str(TRAIN_SEED),
        "split_seed": str(SPLIT_SEED),
    }
    test_path = args.out / "test.safetensors"
    test_tensors = {"images": test_x, "labels": test_y}
    test_meta = {
        "source": SOURCE,
        "licence": LICENCE,
        "changes": f"{N_TEST} of the {N_IMAGES} images, shuffled, stored as safetensors",
        "split_seed": str(SPLIT_SEED),
    }
    write_tensors(weights_path, params, weights_meta)
    write_tensors(test_path, test_tensors, test_meta)

    weights = read_back(weights_path, params, weights_meta)
    test = read_back(test_path, test_tensors, test_meta)
    again = accuracy(weights, test["images"], test["labels"])
    assert again == test_accuracy, (again, test_accuracy)
    print(f"read back: test accuracy {again:.4f}")
    for path in (weights_path, test_path):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"  {path.name}: {path.stat().st_size} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
