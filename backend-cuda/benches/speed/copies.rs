//! Copies between page-locked memory and the device.

use std::ptr;

use anyhow::{Result, ensure};
use highwater_core::{DeviceBuffer, PinnedBuffer, Stream};

use crate::Bench;
use crate::measure::{Bursts, Random, alternate};
use crate::raw::{Owned, done};
use crate::table::{Bar, Row, Table, Unit};

/// Core may split a large buffer into several registrations, which no raw copy may cross. Smaller buffers are never
/// split.
const LEAST_PIECE: usize = 2 << 20;

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let bytes = bench.options.copy_bytes;
    let mut random = Random::new(7);
    let mut pinned = || -> Result<PinnedBuffer<u8>> {
        let mut buffer = bench.runtime.pinned::<u8>(bytes)?;
        random.fill(buffer.write()?);
        Ok(buffer)
    };
    let (source, mut target) = (pinned()?, pinned()?);
    let device = bench.device.allocate::<u8>(bytes)?;
    let stream = bench.device.create_stream()?;
    let mut raw = RawCopies { bench, device: &device, stream: bench.raw.stream()?, bytes, piece: bytes };
    let (from, to) = (source.ptr().as_ptr().cast_const(), target.ptr().as_ptr());
    raw.settle(&stream)?;
    while raw.to_device(from).is_err() && raw.piece > LEAST_PIECE {
        raw.piece = (raw.piece / 2).next_power_of_two();
    }
    let raw = raw;
    let settle = |_| raw.settle(&stream);
    let bursts = Bursts { pairs: bench.options.pairs.min(200), calls: 1 };

    let ours = |_| {
        stream.copy_to_device(&source, &device)?;
        Ok(stream.synchronize()?)
    };
    let to_device = alternate(bursts, settle, ours, |_| raw.to_device(from))?;
    let ours = |_| {
        stream.copy_to_host(&device, &mut target)?;
        Ok(stream.synchronize()?)
    };
    let to_host = alternate(bursts, settle, ours, |_| raw.to_host(to))?;
    ensure!(source.read()? == target.read()?, "what came back from the device is not what was copied there");
    let what = |direction: &str| {
        let cut = if raw.piece < bytes { ", raw cut as the buffer is registered" } else { "" };
        format!("copy {} MiB page-locked {direction}{cut}", bytes >> 20)
    };
    let unit = Unit::Bytes(bytes as u64);
    table.push(Row::pairs(what("to the device"), &to_device).unit(unit).bar(Bar::Rate(0.99)));
    table.push(Row::pairs(what("to the host"), &to_host).unit(unit).bar(Bar::Rate(0.99)));

    // The vendor's own allocation has one piece.
    let mut vendors = VendorsPinned::new(bench, bytes)?;
    random.fill(vendors.bytes_mut());
    let whole = RawCopies { bench, device: &device, stream: bench.raw.stream()?, bytes, piece: bytes };
    let few = Bursts { pairs: bursts.pairs.min(40), calls: 1 };
    let settle = |_| whole.settle(&stream);
    let ours = |_| {
        stream.copy_to_device(&source, &device)?;
        Ok(stream.synchronize()?)
    };
    let to_device = alternate(few, settle, ours, |_| whole.to_device(vendors.ptr))?;
    let ours = |_| {
        stream.copy_to_host(&device, &mut target)?;
        Ok(stream.synchronize()?)
    };
    let to_host = alternate(few, settle, ours, |_| whole.to_host(vendors.ptr))?;
    table.push(Row::pairs("the same to the device; raw: from memory of cuMemHostAlloc", &to_device).unit(unit));
    table.push(Row::pairs("the same to the host; raw: to memory of cuMemHostAlloc", &to_host).unit(unit));
    Ok(())
}

/// The vendor's copies, and the wait for them.
struct RawCopies<'b> {
    bench: &'b Bench<'b>,
    device: &'b DeviceBuffer<u8>,
    stream: Owned,
    bytes: usize,
    piece: usize,
}

impl RawCopies<'_> {
    fn settle(&self, ours: &Stream) -> Result<()> {
        self.bench.raw.synchronize(&self.stream)?;
        Ok(ours.synchronize()?)
    }

    /// The first byte and the length of each piece.
    fn pieces(&self) -> impl Iterator<Item = (usize, usize)> {
        let (bytes, piece) = (self.bytes, self.piece);
        (0..bytes).step_by(piece).map(move |start| (start, piece.min(bytes - start)))
    }

    fn to_device(&self, from: *const u8) -> Result<()> {
        for (start, bytes) in self.pieces() {
            let to = self.device.ptr().get() + start as u64;
            // SAFETY: Both ranges are in live blocks of `self.bytes`, which nothing else uses until the wait below.
            let code =
                unsafe { (self.bench.raw.cuda.copy_to_device)(to, from.wrapping_add(start), bytes, self.stream.get()) };
            done("cuMemcpyHtoDAsync", code)?;
        }
        self.bench.raw.synchronize(&self.stream)
    }

    fn to_host(&self, to: *mut u8) -> Result<()> {
        for (start, bytes) in self.pieces() {
            let from = self.device.ptr().get() + start as u64;
            // SAFETY: As above.
            let code =
                unsafe { (self.bench.raw.cuda.copy_to_host)(to.wrapping_add(start), from, bytes, self.stream.get()) };
            done("cuMemcpyDtoHAsync", code)?;
        }
        self.bench.raw.synchronize(&self.stream)
    }
}

/// Page-locked memory of the vendor's own allocation.
struct VendorsPinned<'b> {
    bench: &'b Bench<'b>,
    ptr: *mut u8,
    bytes: usize,
}

impl<'b> VendorsPinned<'b> {
    fn new(bench: &'b Bench<'b>, bytes: usize) -> Result<Self> {
        let mut ptr = ptr::null_mut();
        // SAFETY: The call writes one pointer, which outlives it.
        done("cuMemHostAlloc", unsafe { (bench.raw.cuda.host_allocate)(&mut ptr, bytes, 0) })?;
        Ok(Self { bench, ptr, bytes })
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: CUDA allocated these bytes and cleared them. No copy is enqueued while `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }
}

impl Drop for VendorsPinned<'_> {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory, and every copy was waited for. An error cannot be reported here.
        unsafe { (self.bench.raw.cuda.host_free)(self.ptr) };
    }
}
