//! Device memory, pinned memory, and copies.

use std::ffi::c_void;
use std::ops::Range;

use front::hal::{DevicePtr, counted};
use front::{
    Access, CopyShape, DeviceBuffer, DeviceSlice, Error, Owner, PinnedBuffer, PinnedSlice, PinnedSliceMut, Result,
    SharedPinnedBuffer,
};

use crate::device::highwater_device;
use crate::failure::{call, invalid};
use crate::handle::{self, Handle, WORDS, get, make_from, make_from_checked_call, place, put, read, release};
use crate::numbers::highwater_status;
use crate::opening::highwater_runtime;
use crate::stream::highwater_stream;

/// Memory of a device.
#[derive(Debug)]
pub enum highwater_buffer {}

/// Page-locked memory of the host.
#[derive(Debug)]
pub enum highwater_pinned {}

handle::kinds! {
    highwater_buffer: DeviceBuffer<u8> = b"hw-devbf";
    highwater_pinned: Pinned = b"hw-pinbf" in Pinned::memory, if Pinned::is_pooled;
}

const _: () = assert!(size_of::<Handle<Pinned>>() <= size_of::<[u64; WORDS]>());

/// Page-locked memory, of the pool or of several processes.
pub(crate) enum Pinned {
    Pooled(PinnedBuffer<u8>),
    /// Boxed, because a move of a pooled buffer then copies fewer words.
    Shared(Box<SharedPinnedBuffer<u8>>),
}

impl Pinned {
    /// Returns a shared buffer, in its box.
    pub(crate) fn shared(buffer: SharedPinnedBuffer<u8>) -> Self {
        Self::Shared(Box::new(buffer))
    }

    /// The memory of the pool's block for the handle. A request that the pool has a block for then allocates nothing.
    #[inline]
    fn memory(&self) -> Option<*mut [u64; WORDS]> {
        match self {
            Self::Pooled(buffer) => Some(buffer.binding_memory()),
            Self::Shared(_) => None,
        }
    }

    #[inline]
    fn is_pooled(&self) -> bool {
        matches!(self, Self::Pooled(_))
    }

    fn data(&self) -> *mut c_void {
        let start = match self {
            Self::Pooled(buffer) => buffer.ptr(),
            Self::Shared(buffer) => buffer.ptr(),
        };
        start.as_ptr().cast()
    }

    fn bytes(&self) -> usize {
        PinnedSlice::from(self).len()
    }

    fn slice(&self, range: Range<usize>) -> Result<PinnedSlice<'_, u8>> {
        match self {
            Self::Pooled(buffer) => buffer.slice(range),
            Self::Shared(buffer) => buffer.slice(range),
        }
    }

    /// Returns a view to copy to.
    ///
    /// # Safety
    /// The caller must ensure that no slice of the values exists until the copy has ended, and that no call shares the memory meanwhile.
    unsafe fn slice_mut(&self, range: Range<usize>) -> Result<PinnedSliceMut<'_, u8>> {
        match self {
            // SAFETY: As the caller promises.
            Self::Pooled(buffer) => unsafe { buffer.slice_mut_shared(range) },
            // SAFETY: As the caller promises.
            Self::Shared(buffer) => unsafe { buffer.slice_mut_shared(range) },
        }
    }

    fn wait_for(&self, access: Access) -> Result<()> {
        match self {
            Self::Pooled(buffer) => buffer.wait_for(access),
            Self::Shared(buffer) => buffer.wait_for(access),
        }
    }

    pub(crate) fn owner(&self) -> Option<Owner> {
        match self {
            Self::Pooled(_) => None,
            Self::Shared(buffer) => buffer.owner(),
        }
    }
}

impl<'b> From<&'b Pinned> for PinnedSlice<'b, u8> {
    fn from(pinned: &'b Pinned) -> Self {
        match pinned {
            Pinned::Pooled(buffer) => buffer.into(),
            Pinned::Shared(buffer) => (&**buffer).into(),
        }
    }
}

/// Ends the caller's object that keeps adopted memory, or that a callback uses.
pub type highwater_end_callback = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// The caller's object. Its end is called in the drop.
pub(crate) struct KeepAlive {
    pub(crate) release: highwater_end_callback,
    pub(crate) user: *mut c_void,
}

// SAFETY: The header says that any thread may call the function.
unsafe impl Send for KeepAlive {}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: The caller promised that the function accepts its pointer in any thread.
            unsafe { release(self.user) }
        }
    }
}

/// Returns a range of memory that has some bytes.
#[inline]
fn range(offset: usize, bytes: usize, memory: usize) -> Result<Range<usize>> {
    match offset.checked_add(bytes) {
        Some(end) if end <= memory => Ok(offset..end),
        _ => Err(outside(offset, bytes, memory)),
    }
}

#[cold]
fn outside(offset: usize, bytes: usize, memory: usize) -> Error {
    invalid(
        format!(
            "the range of {} at offset {offset} leaves the memory, which has {}",
            counted(bytes, "byte"),
            counted(memory, "byte")
        ),
        "pass a range inside the memory, in bytes",
    )
}

fn access(writes: bool) -> Access {
    if writes { Access::Write } else { Access::Read }
}

/// Allocates device memory. Its contents are unspecified.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_allocate(
    device: *mut highwater_device,
    bytes: usize,
    buffer: *mut *mut highwater_buffer,
) -> highwater_status {
    call!(highwater_device_allocate, { make_from(device, buffer, |device| device.allocate::<u8>(bytes)) })
}

/// Allocates device memory that other processes can open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_allocate_shared(
    device: *mut highwater_device,
    bytes: usize,
    buffer: *mut *mut highwater_buffer,
) -> highwater_status {
    call!(highwater_device_allocate_shared, { make_from(device, buffer, |device| device.allocate_shared::<u8>(bytes)) })
}

/// Allocates device memory from the stream's pool, in the order of its work. It is the cheapest kind of scratch memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_stream_allocate(
    stream: *mut highwater_stream,
    bytes: usize,
    buffer: *mut *mut highwater_buffer,
) -> highwater_status {
    call!(highwater_stream_allocate, { make_from(stream, buffer, |stream| stream.allocate::<u8>(bytes)) })
}

/// Makes a buffer over device memory that other code allocated. Once the last use has ended, after the release, `keep_alive_end`
/// is called with `user` in any thread; it may be null. Until then the caller must keep the memory. If this function fails,
/// it calls it at once. It must not throw.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_adopt(
    device: *mut highwater_device,
    address: u64,
    bytes: usize,
    keep_alive_end: highwater_end_callback,
    user: *mut c_void,
    buffer: *mut *mut highwater_buffer,
) -> highwater_status {
    call!(highwater_device_adopt, {
        let keep = KeepAlive { release: keep_alive_end, user };
        make_from(device, buffer, |device| device.adopt::<u8>(DevicePtr::new(address), bytes, keep))
    })
}

/// Writes the address of the memory on its device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_address(
    buffer: *mut highwater_buffer,
    address: *mut u64,
) -> highwater_status {
    call!(highwater_buffer_address, {
        let buffer = get(buffer)?;
        place(address, "address")?;
        put(address, buffer.ptr().get());
        Ok(())
    })
}

/// Writes the number of bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_bytes(buffer: *mut highwater_buffer, bytes: *mut usize) -> highwater_status {
    call!(highwater_buffer_bytes, {
        let buffer = get(buffer)?;
        place(bytes, "bytes")?;
        put(bytes, buffer.len());
        Ok(())
    })
}

/// Notes that work which other code enqueues on the stream uses the memory. Call it before the work is enqueued. One note covers
/// all work on the stream until the buffer is released. The memory is freed or reused only after that work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_used_on(
    buffer: *mut highwater_buffer,
    stream: *mut highwater_stream,
) -> highwater_status {
    call!(highwater_buffer_used_on, {
        let buffer = get(buffer)?;
        get(stream)?.note_device_use(buffer, Access::Write)
    })
}

/// Releases the handle. The memory is freed or reused after the last work that uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_release(buffer: *mut *mut highwater_buffer) -> highwater_status {
    call!(highwater_buffer_release, { release(buffer) })
}

/// Returns page-locked memory from the pool. Its contents are unspecified.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_allocate(
    runtime: *mut highwater_runtime,
    bytes: usize,
    pinned: *mut *mut highwater_pinned,
) -> highwater_status {
    call!(highwater_pinned_allocate, {
        make_from_checked_call(runtime, pinned, |runtime| runtime.pinned::<u8>(bytes).map(Pinned::Pooled))
    })
}

/// As highwater_pinned_allocate, on the NUMA node of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_pinned_allocate(
    device: *mut highwater_device,
    bytes: usize,
    pinned: *mut *mut highwater_pinned,
) -> highwater_status {
    call!(highwater_device_pinned_allocate, {
        make_from_checked_call(device, pinned, |device| device.pinned::<u8>(bytes).map(Pinned::Pooled))
    })
}

/// Writes the address of the memory. Before the CPU accesses memory that a stream has used, call highwater_pinned_wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_data(
    pinned: *mut highwater_pinned,
    data: *mut *mut c_void,
) -> highwater_status {
    call!(highwater_pinned_data, {
        let pinned = get(pinned)?;
        place(data, "address")?;
        put(data, pinned.data());
        Ok(())
    })
}

/// Writes the number of bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_bytes(pinned: *mut highwater_pinned, bytes: *mut usize) -> highwater_status {
    call!(highwater_pinned_bytes, {
        let pinned = get(pinned)?;
        place(bytes, "bytes")?;
        put(bytes, pinned.bytes());
        Ok(())
    })
}

/// Waits until the CPU can access the memory without a race. To read it, the call waits for every stream that writes it; to write it,
/// for every stream that uses it. Returns an error of a copy into the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_wait(pinned: *mut highwater_pinned, to_write: bool) -> highwater_status {
    call!(highwater_pinned_wait, { get(pinned)?.wait_for(access(to_write)) })
}

/// Notes that work which other code has enqueued on the stream so far uses the memory. Call it after the work is enqueued, and
/// before the memory is accessed, copied or released. The memory is reused only after that work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_used_on(
    pinned: *mut highwater_pinned,
    stream: *mut highwater_stream,
    writes: bool,
) -> highwater_status {
    call!(highwater_pinned_used_on, {
        let pinned = get(pinned)?;
        get(stream)?.note_pinned_use(pinned, access(writes))
    })
}

/// Releases the handle. The memory is reused after the last work that uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_release(pinned: *mut *mut highwater_pinned) -> highwater_status {
    call!(highwater_pinned_release, { release(pinned) })
}

/// Enqueues a copy of pinned memory to a device. Returns at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_copy_to_device(
    stream: *mut highwater_stream,
    source: *mut highwater_pinned,
    source_offset: usize,
    destination: *mut highwater_buffer,
    destination_offset: usize,
    bytes: usize,
) -> highwater_status {
    call!(highwater_copy_to_device, {
        let (stream, source, destination) = (get(stream)?, get(source)?, get(destination)?);
        let source = source.slice(range(source_offset, bytes, source.bytes())?)?;
        stream.copy_to_device(source, destination.slice(range(destination_offset, bytes, destination.len())?)?)
    })
}

/// Enqueues a copy of device memory to pinned memory. Returns at once; highwater_pinned_wait waits for the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_copy_to_host(
    stream: *mut highwater_stream,
    source: *mut highwater_buffer,
    source_offset: usize,
    destination: *mut highwater_pinned,
    destination_offset: usize,
    bytes: usize,
) -> highwater_status {
    call!(highwater_copy_to_host, {
        let (stream, source, destination) = (get(stream)?, get(source)?, get(destination)?);
        let source = source.slice(range(source_offset, bytes, source.len())?)?;
        // No slice of this memory exists: C gets its address alone.
        let destination = destination.slice_mut(range(destination_offset, bytes, destination.bytes())?)?;
        stream.copy_to_host(source, destination)
    })
}

/// Enqueues a copy between buffers, also of two devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_copy(
    stream: *mut highwater_stream,
    source: *mut highwater_buffer,
    source_offset: usize,
    destination: *mut highwater_buffer,
    destination_offset: usize,
    bytes: usize,
) -> highwater_status {
    call!(highwater_copy, {
        let (stream, source, destination) = (get(stream)?, get(source)?, get(destination)?);
        let source = source.slice(range(source_offset, bytes, source.len())?)?;
        stream.copy(source, destination.slice(range(destination_offset, bytes, destination.len())?)?)
    })
}

/// The shape of a two-dimensional copy: rows of bytes at equal distances. All fields except `height` are in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct highwater_copy_shape {
    /// sizeof(highwater_copy_shape).
    pub size: usize,
    /// Bytes of each row. With 0, nothing is copied.
    pub width: usize,
    /// Number of rows. With 0, nothing is copied.
    pub height: usize,
    /// Bytes from the beginning of one row to that of the next in the source, at least `width`; 0 if the rows are adjacent.
    pub source_pitch: usize,
    /// The same in the destination.
    pub destination_pitch: usize,
}

handle::options! {
    highwater_copy_shape up to destination_pitch: usize;
}

/// Reads the shape of a copy.
///
/// # Safety
/// As for [`read`].
unsafe fn copy_shape(given: *const highwater_copy_shape) -> Result<CopyShape> {
    // SAFETY: As the caller promises.
    let given = unsafe { read(given) }?;
    let or = |pitch: usize| if pitch == 0 { given.width } else { pitch };
    Ok(CopyShape::new(given.width, given.height)
        .with_src_pitch(or(given.source_pitch))
        .with_dst_pitch(or(given.destination_pitch)))
}

/// Returns the memory of a buffer from an offset on.
fn from_offset(buffer: &DeviceBuffer<u8>, offset: usize) -> Result<DeviceSlice<'_, u8>> {
    buffer.slice(range(offset, buffer.len().saturating_sub(offset), buffer.len())?)
}

/// Enqueues a copy of rows of pinned memory to a device, as cudaMemcpy2DAsync does. The first row begins at the offsets. Bytes
/// between the rows keep their value. Returns at once.
///
/// HIGHWATER_ERROR_INVALID_ARGUMENT: a pitch is less than the width, or the rows leave the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_copy_2d_to_device(
    stream: *mut highwater_stream,
    source: *mut highwater_pinned,
    source_offset: usize,
    destination: *mut highwater_buffer,
    destination_offset: usize,
    shape: *const highwater_copy_shape,
) -> highwater_status {
    call!(highwater_copy_2d_to_device, {
        let (stream, source, destination) = (get(stream)?, get(source)?, get(destination)?);
        let shape = copy_shape(shape)?;
        let source =
            source.slice(range(source_offset, source.bytes().saturating_sub(source_offset), source.bytes())?)?;
        stream.copy_2d_to_device(source, from_offset(destination, destination_offset)?, shape)
    })
}

/// As highwater_copy_2d_to_device, from a device to pinned memory. highwater_pinned_wait waits for the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_copy_2d_to_host(
    stream: *mut highwater_stream,
    source: *mut highwater_buffer,
    source_offset: usize,
    destination: *mut highwater_pinned,
    destination_offset: usize,
    shape: *const highwater_copy_shape,
) -> highwater_status {
    call!(highwater_copy_2d_to_host, {
        let (stream, source, destination) = (get(stream)?, get(source)?, get(destination)?);
        let shape = copy_shape(shape)?;
        let source = from_offset(source, source_offset)?;
        // No slice of this memory exists: C gets its address alone.
        let destination = destination.slice_mut(range(
            destination_offset,
            destination.bytes().saturating_sub(destination_offset),
            destination.bytes(),
        )?)?;
        stream.copy_2d_to_host(source, destination, shape)
    })
}

/// As highwater_copy_2d_to_device, between buffers of one or two devices. The buffers may be the same, if no row of one side overlaps a
/// row of the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_copy_2d(
    stream: *mut highwater_stream,
    source: *mut highwater_buffer,
    source_offset: usize,
    destination: *mut highwater_buffer,
    destination_offset: usize,
    shape: *const highwater_copy_shape,
) -> highwater_status {
    call!(highwater_copy_2d, {
        let (stream, source, destination) = (get(stream)?, get(source)?, get(destination)?);
        let shape = copy_shape(shape)?;
        stream.copy_2d(from_offset(source, source_offset)?, from_offset(destination, destination_offset)?, shape)
    })
}

/// Copies any memory of the host to a device, staged through pinned memory. The caller may change or free the source after the
/// call. The copy to the device is enqueued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_write(
    stream: *mut highwater_stream,
    source: *const c_void,
    destination: *mut highwater_buffer,
    destination_offset: usize,
    bytes: usize,
) -> highwater_status {
    call!(highwater_write, {
        let (stream, destination) = (get(stream)?, get(destination)?);
        let destination = destination.slice(range(destination_offset, bytes, destination.len())?)?;
        memory_of_caller(source, bytes, "source")?;
        if bytes == 0 {
            return Ok(());
        }
        stream.write(std::slice::from_raw_parts(source.cast::<u8>(), bytes), destination)
    })
}

/// Copies device memory to any memory of the host. Waits for the copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_read(
    stream: *mut highwater_stream,
    source: *mut highwater_buffer,
    source_offset: usize,
    destination: *mut c_void,
    bytes: usize,
) -> highwater_status {
    call!(highwater_read, {
        let (stream, source) = (get(stream)?, get(source)?);
        let source = source.slice(range(source_offset, bytes, source.len())?)?;
        memory_of_caller(destination, bytes, "destination")?;
        if bytes == 0 {
            return Ok(());
        }
        // The caller's memory may be uninitialized, so no reference to it may exist before it is written.
        let values = stream.download(source)?;
        std::ptr::copy_nonoverlapping(values.as_ptr(), destination.cast::<u8>(), bytes);
        Ok(())
    })
}

/// Enqueues a fill of bytes with one value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_fill(
    stream: *mut highwater_stream,
    buffer: *mut highwater_buffer,
    offset: usize,
    bytes: usize,
    value: u8,
) -> highwater_status {
    call!(highwater_fill, {
        let (stream, buffer) = (get(stream)?, get(buffer)?);
        stream.fill(buffer.slice(range(offset, bytes, buffer.len())?)?, value)
    })
}

fn memory_of_caller(address: *const c_void, bytes: usize, name: &str) -> Result<()> {
    if address.is_null() && bytes > 0 {
        let message = format!("the {name} is null, expected the address of {}", counted(bytes, "byte"));
        return Err(invalid(message, "pass memory of the host"));
    }
    Ok(())
}
