//! [`DeviceBuffer`]: typed device memory that is given back after every stream that used it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{AllocateOptions, DeviceMemoryKind, DevicePtr};
use crate::pool::deferred::DeferredFree;
use crate::runtime::Runtime;
use crate::scalar::Element;
use crate::stream::{StreamCore, StreamUse};

/// `len` values of `T` in the memory of one device.
///
/// Dropping a buffer never waits: its memory is freed once every stream that used it has passed that use. Device work of
/// different streams on one buffer is not ordered by itself; unordered access gives unspecified values and nothing worse.
///
/// The CPU cannot reach into a buffer:
///
/// ```compile_fail,E0608
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
/// println!("{}", buffer[0]);
/// ```
///
/// and it holds only types whose every bit pattern is a value:
///
/// ```compile_fail,E0277
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<String>(4).unwrap();
/// ```
pub struct DeviceBuffer<T: Element> {
    block: Arc<DeviceBlock>,
    len: usize,
    elements: PhantomData<T>,
}

/// A block of device memory with the streams that used it. Counted: whoever needs the memory to stay holds a reference.
pub(crate) struct DeviceBlock {
    pub(crate) runtime: Runtime,
    pub(crate) device: u32,
    pub(crate) ptr: DevicePtr,
    /// The stream whose order allocation and free follow, for stream-ordered memory.
    home: Option<Arc<StreamCore>>,
    /// Key of the stream noted last, 0 for none; a stream that is noted again costs one load.
    last_use: AtomicU64,
    uses: Mutex<Vec<StreamUse>>,
}

impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("device", &self.block.device)
            .field("ptr", &self.block.ptr)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

pub(crate) fn size_in_bytes<T>(operation: &'static str, len: usize) -> Result<usize> {
    let invalid = |message: String| {
        Error::new(ErrorKind::InvalidArgument, operation, message).with_hint("check the length and the element type")
    };
    if size_of::<T>() == 0 {
        return Err(invalid(format!("{} has no size", std::any::type_name::<T>())));
    }
    // An empty buffer is one element long underneath: vendors have no empty blocks.
    len.max(1)
        .checked_mul(size_of::<T>())
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| invalid(format!("{len} values of {} do not fit the address space", std::any::type_name::<T>())))
}

/// Checks a range of values against the length of a buffer.
pub(crate) fn check_range(range: &Range<usize>, len: usize) -> Result<()> {
    if range.start > range.end || range.end > len {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "slice",
            format!("{range:?} does not lie in a buffer of {len} values"),
        )
        .with_hint("ranges count values, not bytes"));
    }
    Ok(())
}

impl<T: Element> DeviceBuffer<T> {
    pub(crate) fn new(runtime: Runtime, device: u32, len: usize, kind: DeviceMemoryKind) -> Result<Self> {
        Self::with_home(runtime, device, len, kind, None)
    }

    pub(crate) fn with_home(
        runtime: Runtime,
        device: u32,
        len: usize,
        kind: DeviceMemoryKind,
        home: Option<Arc<StreamCore>>,
    ) -> Result<Self> {
        runtime.inner.check("allocate")?;
        let bytes = size_in_bytes::<T>("allocate", len)?;
        let ptr = runtime.inner.allocate_device(device, &AllocateOptions::new(bytes).with_kind(kind))?;
        let block = DeviceBlock { runtime, device, ptr, home, last_use: AtomicU64::new(0), uses: Mutex::default() };
        Ok(Self { block: Arc::new(block), len, elements: PhantomData })
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ordinal of the device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.block.device
    }

    /// Address of the first value, for calls of the vendor itself.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr
    }

    /// A view of some of the values.
    ///
    /// # Errors
    /// `InvalidArgument` where the range does not lie in the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        check_range(&range, self.len)?;
        Ok(DeviceSlice { block: &self.block, offset: range.start, len: range.len(), elements: PhantomData })
    }
}

/// A view of values in a [`DeviceBuffer`]; what the operations of a stream take. It does not outlive the buffer:
///
/// ```compile_fail,E0505
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let buffer = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
/// let slice = buffer.slice(0..2).unwrap();
/// drop(buffer);
/// println!("{slice:?}");
/// ```
pub struct DeviceSlice<'b, T: Element> {
    pub(crate) block: &'b Arc<DeviceBlock>,
    offset: usize,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for DeviceSlice<'_, T> {}

impl<T: Element> fmt::Debug for DeviceSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("device", &self.block.device)
            .field("ptr", &self.ptr())
            .field("len", &self.len)
            .finish()
    }
}

impl<'b, T: Element> From<&'b DeviceBuffer<T>> for DeviceSlice<'b, T> {
    fn from(buffer: &'b DeviceBuffer<T>) -> Self {
        Self { block: &buffer.block, offset: 0, len: buffer.len, elements: PhantomData }
    }
}

impl<T: Element> DeviceSlice<'_, T> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ordinal of the device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.block.device
    }

    /// Address of the first value.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr.offset(self.offset * size_of::<T>())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Whether the first `len` values of this view and the first `other_len` of the other share a byte.
    pub(crate) fn overlaps(&self, len: usize, other: &Self, other_len: usize) -> bool {
        Arc::ptr_eq(self.block, other.block)
            && len > 0
            && other_len > 0
            && self.offset < other.offset + other_len
            && other.offset < self.offset + len
    }
}

impl DeviceBlock {
    /// Notes that work on `stream` uses the block.
    #[inline]
    pub(crate) fn note_use(&self, stream: &Arc<StreamCore>) {
        // Relaxed: the list itself is under the lock; this only tells that the key was noted before, and the key of a
        // stream that is in use does not leave the list.
        if self.last_use.load(Ordering::Relaxed) == stream.key {
            return;
        }
        let count = {
            let mut uses = self.uses.lock();
            if !uses.iter().any(|use_| use_.key() == stream.key) {
                uses.push(stream.to_use());
            }
            uses.len()
        };
        self.last_use.store(stream.key, Ordering::Relaxed);
        // Now and then, so that a buffer that outlives many streams does not remember them all.
        if count >= 8 && count.is_power_of_two() {
            self.forget_ended_streams();
        }
    }

    /// Forgets the streams that have ended and are done. Keys are never used twice, so they are not noted again.
    #[cold]
    fn forget_ended_streams(&self) {
        let ended: Vec<_> = self.uses.lock().iter().filter_map(StreamUse::if_ended).collect();
        for (key, mark) in ended {
            if self.runtime.inner.is_passed(&mark, false).unwrap_or(false) {
                self.uses.lock().retain(|use_| use_.key() != key);
            }
        }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let inner = &self.runtime.inner;
        if !inner.may_release() {
            return;
        }
        let mut after = Vec::new();
        let mut unmarked = false;
        for use_ in self.uses.get_mut() {
            match use_.mark(inner) {
                Some(mark) => after.push(mark),
                None => unmarked = true,
            }
        }
        let free = DeferredFree { device: self.device, ptr: self.ptr, home: self.home.take(), after };
        if unmarked {
            return inner.strand(free);
        }
        let Some(home) = free.home.as_ref().map(|home| home.id) else {
            return inner.defer_free(free);
        };
        // Freed in the order of its own stream, which first waits, on the device, for the others.
        let waits = free.after.iter().try_for_each(|mark| inner.backend.stream_wait_event(home, mark.event()));
        let freed = waits.and_then(|()| {
            // SAFETY: the block's owner is gone, and the work of every stream that used it precedes the free on the home
            // stream.
            unsafe { inner.free_device(self.device, self.ptr, Some(home)) }
        });
        if let Err(error) = freed {
            inner.count_failed_release(&error);
            inner.strand(free);
        }
    }
}
