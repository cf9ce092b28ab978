//! Copies and fills on a stream, between memory of any kind.
//!
//! A copy from or to pageable memory returns when that memory may be used again, as with the vendor. The call copies a
//! short source into the queue and waits for the other copies.

use std::ptr::NonNull;

pub use highwater_hal::CopyShape;
use highwater_hal::{Backend, DevicePtr, HostPtr, Location};
use highwater_mock::simulated::Call;

use crate::blocks::{Block, MEMORY, Place};
use crate::capture_state::node;
use crate::code::{Answer, Code};
use crate::current;
use crate::handles::Stream;
use crate::process::{Simulation, simulation};
use crate::streams::LEGACY;
use crate::variants::{Vendor, vendor};

/// The call copies pageable sources up to this length into the queue.
const QUEUED_SOURCE: usize = 64 << 10;

/// The largest pitch of a row.
const MAX_PITCH: usize = i32::MAX as usize;

/// The sides of a copy that must be memory of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Neither: the addresses decide.
    Any,
    /// The destination.
    ToDevice,
    /// The source.
    ToHost,
    /// Both.
    OnDevices,
}

fn host(address: u64) -> Answer<HostPtr> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize)).map(HostPtr::new).ok_or(Code::INVALID_VALUE)
}

fn location(place: Place, address: u64) -> Answer<Location> {
    Ok(match place {
        Place::Device(device) => Location::Device { device, ptr: DevicePtr::new(address) },
        Place::Pinned | Place::Pageable => Location::Host(host(address)?),
    })
}

/// Host memory that a stream's worker writes.
#[derive(Clone, Copy)]
struct Target(*mut u8);

// SAFETY: it is used as the caller of the fill promised, by one thread at a time.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Simulation {
    /// Returns whether a range of device memory begins in one mapping and ends in another. Without a current context, CUDA refuses
    /// copies of such memory.
    fn crosses(&self, address: u64, bytes: u64) -> Answer<bool> {
        let (place, room) = self.piece(address)?;
        Ok(matches!(place, Place::Device(_)) && room < bytes)
    }

    /// Checks a copy and enqueues it. Returns whether the call waits for it: if the queued copy refers to pageable memory, and
    /// if both sides are host memory (CUDA).
    ///
    /// # Safety
    /// As [`copy`].
    unsafe fn enqueue_copy(
        &self,
        stream: &Stream,
        dst: u64,
        src: u64,
        bytes: usize,
        direction: Direction,
    ) -> Answer<bool> {
        let (to, from) = (self.place(dst, bytes as u64)?, self.place(src, bytes as u64)?);
        let known = |place: Place| place != Place::Pageable;
        let fits = match direction {
            Direction::Any => true,
            Direction::ToDevice => known(to),
            Direction::ToHost => known(from),
            Direction::OnDevices => known(to) && known(from),
        };
        if !fits
            || (current::device().is_none() && (self.crosses(dst, bytes as u64)? || self.crosses(src, bytes as u64)?))
        {
            return Err(Code::INVALID_VALUE);
        }
        let recording = self.is_recording(stream)?;
        if let (Place::Device(device), Place::Pageable, false, ..=QUEUED_SOURCE) = (to, from, recording, bytes)
            && self.piece(dst)?.1 >= bytes as u64
        {
            let mut taken = vec![0u8; bytes];
            // SAFETY: the caller says that the source is readable.
            unsafe { std::ptr::copy_nonoverlapping(host(src)?.as_ptr(), taken.as_mut_ptr(), bytes) };
            let (ptr, id) = (DevicePtr::new(dst), stream.id);
            self.hooks.enqueue_write(id, device, ptr, taken).map_err(|error| self.code_of(error))?;
            return Ok(false);
        }
        let mut done = 0;
        while done < bytes as u64 {
            let ((to, room), (from, rest)) = (self.piece(dst + done)?, self.piece(src + done)?);
            let part = room.min(rest).min(bytes as u64 - done);
            let (to, from) = (location(to, dst + done)?, location(from, src + done)?);
            // SAFETY: the ranges were checked, and the rest is the caller's promise.
            unsafe { self.hooks.enqueue_copy(stream.id, to, from, part as usize) }
                .map_err(|error| self.code_of(error))?;
            done += part;
        }
        let by_reference = !known(to) || !known(from);
        let on_host = |place: Place| !matches!(place, Place::Device(_));
        let by_host = vendor() == Vendor::Cuda && on_host(to) && on_host(from);
        Ok((by_reference || by_host) && !recording)
    }
}

/// `cuMemcpyAsync` and its relatives.
///
/// # Errors
/// 1 for ranges that leave the block in which they begin and for memory that contradicts the direction; 901 in an invalidated
/// capture; the code of a lost context.
///
/// # Safety
/// Pageable memory must be valid during the call (in a capture until the graph's last launch is done). Page-locked and device
/// memory must be valid until the copy has been executed. No other code may write the source in the meantime.
pub unsafe fn copy(dst: u64, src: u64, bytes: usize, raw_stream: u64, direction: Direction) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let (dst, src) = (simulation.on_host(dst), simulation.on_host(src));
    // SAFETY: forwarded to the caller.
    let waits = unsafe { simulation.enqueue_copy(&stream, dst, src, bytes, direction) }?;
    simulation.note_nodes(&stream, node::COPY, 1);
    if waits {
        simulation.gpu.synchronize_stream(stream.id).map_err(|error| simulation.code_of(error))?;
    }
    Ok(())
}

/// `cuMemcpy2DAsync_v2` and its relatives: one operation of the stream for all rows.
///
/// # Errors
/// As [`copy`]; 1 for pitches that are less than the width, or greater than the vendor's maximum.
///
/// # Safety
/// As [`copy`], for the bytes from the first row to the end of the last.
pub unsafe fn copy_rows(dst: u64, src: u64, shape: CopyShape, raw_stream: u64, direction: Direction) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    let too_far = shape.height > 1 && shape.src_pitch.max(shape.dst_pitch) > MAX_PITCH;
    let (Ok(()), false, Some(to_bytes), Some(from_bytes)) =
        (shape.check("copy_2d"), too_far, shape.dst_bytes(), shape.src_bytes())
    else {
        return Err(Code::INVALID_VALUE);
    };
    if shape.is_empty() {
        return Ok(());
    }
    let (dst, src) = (simulation.on_host(dst), simulation.on_host(src));
    // Before the first row: a copy that is refused copies nothing.
    simulation.place(dst, to_bytes as u64)?;
    simulation.place(src, from_bytes as u64)?;
    let mut waits = false;
    for (to, from) in shape.rows() {
        // SAFETY: forwarded to the caller.
        waits |=
            unsafe { simulation.enqueue_copy(&stream, dst + to as u64, src + from as u64, shape.width, direction) }?;
    }
    simulation.note_nodes(&stream, node::COPY, 1);
    if waits {
        simulation.gpu.synchronize_stream(stream.id).map_err(|error| simulation.code_of(error))?;
    }
    Ok(())
}

/// `cuMemcpy3DPeerAsync`, for one layer.
///
/// # Errors
/// As [`copy_rows`] and [`copy_peer`].
///
/// # Safety
/// As [`copy_rows`].
pub unsafe fn copy_rows_to_peer(
    dst: u64,
    src: u64,
    [dst_context, src_context]: [u64; 2],
    shape: CopyShape,
    raw_stream: u64,
) -> Answer<()> {
    check_peers([dst_context, src_context], raw_stream)?;
    // SAFETY: forwarded to the caller.
    unsafe { copy_rows(dst, src, shape, raw_stream, Direction::OnDevices) }
}

/// Checks the contexts of a copy between devices, and that its stream does not record.
fn check_peers(contexts: [u64; 2], raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    for context in contexts {
        let device = crate::current::device_of(simulation, context).ok_or(Code::INVALID_CONTEXT)?;
        simulation.check_context(device)?;
    }
    simulation.check_not_capturing(&simulation.stream(raw_stream)?)
}

/// `cuMemcpyHtoD_v2` and its relatives. The copy runs on the legacy default stream and is done when the call returns.
///
/// # Errors
/// As [`copy`], 201 without a context, 900 and 906 while a capture is open.
///
/// # Safety
/// All memory must be valid during the call, and no other code may write the source in the meantime.
pub unsafe fn copy_now(dst: u64, src: u64, bytes: usize, direction: Direction) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(LEGACY)?;
    simulation.check_legacy_use(stream.device)?;
    simulation.check_unsafe_call()?;
    // SAFETY: forwarded to the caller.
    unsafe { copy(dst, src, bytes, LEGACY, direction) }?;
    simulation.gpu.synchronize_stream(stream.id).map_err(|error| simulation.code_of(error))
}

/// `cuMemcpyPeerAsync`.
///
/// # Errors
/// As [`copy`]; 201 for an unknown context, 900 in a capture, which is then invalidated.
///
/// # Safety
/// As [`copy`].
pub unsafe fn copy_peer(
    dst: u64,
    dst_context: u64,
    src: u64,
    src_context: u64,
    bytes: usize,
    raw_stream: u64,
) -> Answer<()> {
    check_peers([dst_context, src_context], raw_stream)?;
    // SAFETY: forwarded to the caller.
    unsafe { copy(dst, src, bytes, raw_stream, Direction::OnDevices) }
}

/// `cuMemsetD8Async` and its relatives: `count` elements of `width` bytes, each with the low bytes of `value`.
///
/// # Errors
/// 1 for an address that is not a multiple of the width, and for ranges that leave their block or are pageable memory; 901 in
/// an invalidated capture; the code of a lost context. CUDA: 1 for memory that the stream's device cannot access. In a capture,
/// CUDA does not see whether a range leaves its block. The graph then loses the contexts.
///
/// # Safety
/// Page-locked memory must be valid until the fill has been executed.
pub unsafe fn fill(dst: u64, value: u32, width: usize, count: usize, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    let bytes = count.checked_mul(width).ok_or(Code::INVALID_VALUE)?;
    if !dst.is_multiple_of(width as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if bytes == 0 {
        return Ok(());
    }
    let dst = simulation.on_host(dst);
    let pattern = match width {
        1 => u64::from_ne_bytes([value as u8; 8]),
        2 => u64::from(value as u16) * 0x0001_0001_0001_0001,
        _ => u64::from(value) << 32 | u64::from(value),
    };
    let is_cuda = vendor() == Vendor::Cuda;
    match simulation.place(dst, bytes as u64) {
        Ok(Place::Pageable) => return Err(Code::INVALID_VALUE),
        Ok(_) => {}
        Err(_) if is_cuda && simulation.is_recording(&stream)? => {
            let fault = Call::new(|| simulation.lose_contexts(Code::ILLEGAL_ADDRESS));
            simulation.hooks.enqueue_call(stream.id, fault).map_err(|error| simulation.code_of(error))?;
            simulation.note_nodes(&stream, node::FILL, 1);
            return Ok(());
        }
        Err(code) => return Err(code),
    }
    let unreachable = |(_, block): (u64, Block)| !simulation.reaches(stream.device, &block);
    if is_cuda && MEMORY.around(dst).is_some_and(unreachable) {
        return Err(Code::INVALID_VALUE);
    }
    let mut done = 0;
    while done < bytes as u64 {
        let (place, room) = simulation.piece(dst + done)?;
        let part = room.min(bytes as u64 - done);
        match place {
            Place::Device(device) => {
                let ptr = DevicePtr::new(dst + done);
                simulation
                    .hooks
                    .enqueue_fill(stream.id, device, ptr, part as usize, pattern)
                    .map_err(|error| simulation.code_of(error))?;
            }
            Place::Pinned | Place::Pageable => {
                let target = Target(host(dst + done)?.as_ptr());
                let call = Call::new(move || {
                    let target = target;
                    let pattern = pattern.to_ne_bytes();
                    for at in 0..part as usize {
                        // SAFETY: the range is inside of one page-locked block, which stays until the fill is done.
                        unsafe { target.0.add(at).write(pattern[at % width]) };
                    }
                });
                simulation.hooks.enqueue_call(stream.id, call).map_err(|error| simulation.code_of(error))?;
            }
        }
        done += part;
    }
    simulation.note_nodes(&stream, node::FILL, 1);
    Ok(())
}
