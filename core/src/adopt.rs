//! [`Device::adopt`]: buffers over device memory that other code allocated.
//!
//! An adopted buffer is a block like any other: streams note their uses, captures keep it, and other processes open it by a
//! ticket. Two things differ. Its end drops the caller's `keep_alive` and frees nothing. And a ticket names the allocation
//! around the buffer, because vendors share whole allocations: one block, or every mapping that the buffer touches. Memory of a
//! pool and managed memory take part in all work, and only a ticket of them is refused.
//!
//! [`DeviceBuffer::from_raw`] is the same without `keep_alive`. The caller keeps the memory then, so its end waits for nothing.
//!
//! The end of a buffer never drops `keep_alive` in a forked child or once the process exits, because the drop may call the
//! driver. It is left to the end of the process, as all other memory is.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::buffer::{DeviceBuffer, size_in_bytes};
use crate::capture::thread::{in_capture, refuse_in_capture};
use crate::device::Device;
use crate::device_block::{DeviceBlock, Origin, SharedMemory};
use crate::pool::completion_events::CompletionEvent;
use crate::pool::keep_alive::KeepAlive;
use crate::runtime::Runtime;
use crate::services::{Services, lacks_transport};
use crate::sharing::{ExportKey, MemoryPart, Ticket, WeakMemory};
use highwater_hal::{
    AllocateOptions, DeviceMemoryKind, DevicePtr, Element, Error, ErrorKind, MemoryRange, RangeKind, Result, Transport,
    Transports, counted,
};

const OPERATION: &str = "adopt";

/// Memory that other code allocated.
struct Adopted {
    runtime: Runtime,
    /// The block or the mappings that the buffer touches, without a gap between them.
    pieces: Box<[MemoryRange]>,
    /// The same, as parts for other processes.
    parts: Arc<[MemoryPart]>,
    /// The buffer's bytes, counted from the start of the first piece.
    range: Range<u64>,
    keep: Mutex<Option<KeepAlive>>,
    /// Whether the drop of `keep` has an effect. Otherwise nothing waits for the last use.
    ends_late: bool,
    /// The transport that exports the pieces, found by the first share.
    transport: OnceLock<Transport>,
    /// The key of the allocation in the exporter, set by the first share.
    key: OnceLock<ExportKey>,
}

impl Adopted {
    /// Finds the transport that exports the pieces, by trying those that the backend names for all of them.
    fn find_transport(&self, device: u32) -> Result<Transport> {
        if let Some(transport) = self.transport.get() {
            return Ok(*transport);
        }
        let inner = &self.runtime.inner;
        let offered = inner.device(device).capabilities.ipc_transports;
        let named = self.pieces.iter().fold(offered, |named, piece| named.and(piece.transports));
        let first = &self.pieces[0];
        check_kind(first)?;
        let mut refusal = None;
        for transport in [Transport::Descriptor, Transport::Legacy, Transport::Fabric] {
            // A legacy handle names one plain block, and cannot be mapped beside another.
            if !named.contains(transport) || (transport == Transport::Legacy && self.pieces.len() > 1) {
                continue;
            }
            let ipc = inner.ipc("share")?;
            // SAFETY: The backend described the piece, and the buffer keeps it allocated.
            match unsafe { ipc.export_memory(device, first.base, transport) } {
                Ok(mut handle) => {
                    handle.bytes = first.bytes as u64;
                    self.parts[0].keep_handle(&handle);
                    return Ok(*self.transport.get_or_init(|| transport));
                }
                Err(error) => refusal = Some(error),
            }
        }
        Err(not_shareable(first.kind, offered, refusal))
    }
}

/// Returns the error of adopted memory that no transport exports.
#[cold]
fn not_shareable(kind: RangeKind, offered: Transports, refusal: Option<Error>) -> Error {
    const COPY: &str = "copy it into a buffer of `Device::allocate_shared`, or allocate it with a handle that other processes \
                        can open";
    if offered.is_empty() {
        return Error::lacks("share", "ipc_transports");
    }
    let refused = |message: String| Error::new(ErrorKind::InvalidArgument, "share", message).with_hint(COPY);
    match refusal {
        Some(error) => {
            let message = format!("the adopted memory cannot be exported: {}", error.message());
            let refused = Error::new(error.kind(), "share", message).with_hint(COPY);
            error.code().into_iter().fold(refused, Error::with_code)
        }
        None if kind == RangeKind::Mapped => {
            refused("the adopted memory was mapped without a handle that other processes can open".to_owned())
        }
        None => refused("the driver exports the adopted memory by no transport".to_owned()),
    }
}

impl SharedMemory for Adopted {
    fn share(&self, block: &Arc<DeviceBlock>, after: Vec<Arc<CompletionEvent>>) -> Result<Ticket> {
        let inner = &self.runtime.inner;
        let transport = self.find_transport(block.device)?;
        let uuid = inner.device(block.device).info.uuid;
        let bytes = self.pieces.iter().map(|piece| piece.bytes as u64).sum();
        let memory = WeakMemory::Adopted(Arc::downgrade(block), Arc::clone(&self.parts));
        let mut ticket = inner.sharing("share")?.share(memory, &self.key, transport, bytes, uuid, after)?;
        ticket.offset = self.range.start;
        Ok(ticket)
    }

    fn release(&self, block: &mut DeviceBlock) {
        if !self.ends_late && self.key.get().is_none() {
            self.keep.lock().take().iter().for_each(KeepAlive::end);
            return;
        }
        let mut free = block.deferred_free();
        free.keeps = self.keep.lock().take();
        let inner = &self.runtime.inner;
        // Other processes may have the memory open. Then it waits in limbo.
        let free = match (self.key.get(), inner.sharing.get()) {
            (Some(key), Some(sharing)) => sharing.close(*key, free),
            _ => Some(free),
        };
        let Some(mut free) = free else { return };
        // The program may wait for its end, and no request for memory needs to come.
        free.after.retain(|completion| !inner.is_surely_passed(completion));
        match &free.keeps {
            Some(keeps) if free.after.is_empty() && free.later.is_empty() && !free.unmarked && !in_capture() => {
                keeps.end();
            }
            _ => {
                inner.frees.defer(free);
                // If no thread can be started, the next request for memory or wait for a stream looks after it.
                if let Ok(sharing) = inner.sharing_unstarted(OPERATION) {
                    sharing.look_after_adopted();
                }
            }
        }
    }

    fn transport(&self, device: u32) -> Result<Transport> {
        self.find_transport(device)
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    fn export(&self) -> Option<(Runtime, ExportKey)> {
        self.key.get().map(|key| (self.runtime.clone(), *key))
    }
}

fn invalid(operation: &'static str, message: String, hint: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, message).with_hint(hint)
}

/// Checks an address and a length, which the backend does not see.
fn check_arguments<T: Element>(operation: &'static str, ptr: DevicePtr, bytes: usize) -> Result<()> {
    let invalid = |message, hint| invalid(operation, message, hint);
    let (name, size, alignment) = (std::any::type_name::<T>(), size_of::<T>(), align_of::<T>());
    if ptr.get() == 0 {
        return Err(Error::new(ErrorKind::InvalidPointer, operation, "the address is null")
            .with_hint("pass the address of the first byte"));
    }
    if bytes == 0 {
        return Err(invalid("0 bytes cannot be adopted".to_owned(), "pass the number of bytes, at least one value"));
    }
    if size == 0 || !bytes.is_multiple_of(size) {
        let message = format!(
            "the size of {} is not a multiple of that of {name}, which has {}",
            counted(bytes, "byte"),
            counted(size, "byte")
        );
        return Err(invalid(message, "pass a multiple of the size of the element type"));
    }
    if !ptr.is_aligned_to(alignment) {
        let message = format!("{ptr} is not a multiple of {alignment}, the alignment of {name}");
        return Err(invalid(message, "adopt the bytes as a type of smaller alignment, such as u8"));
    }
    if ptr.get().checked_add(bytes as u64).is_none() || isize::try_from(bytes).is_err() {
        return Err(invalid(
            format!("the memory of {} at {ptr} leaves the address space", counted(bytes, "byte")),
            "pass the number of bytes",
        ));
    }
    Ok(())
}

/// Refuses to share memory that no process can open.
fn check_kind(range: &MemoryRange) -> Result<()> {
    let invalid = |message, hint| invalid("share", message, hint);
    let at = range.base;
    match range.kind {
        RangeKind::StreamOrdered => Err(invalid(
            format!(
                "the memory at {at} belongs to a pool that is freed in the order of streams: no process can open it"
            ),
            "allocate it outside the pool, or copy it into a buffer of `Device::allocate_shared`",
        )),
        RangeKind::Managed => Err(invalid(
            format!(
                "the memory at {at} is managed: the driver moves it between CPU and devices, and no process can open it"
            ),
            "allocate it as memory of the device, or copy it into a buffer of `Device::allocate_shared`",
        )),
        _ => Ok(()),
    }
}

impl Device {
    /// Returns the block that contains the range, or the mappings that contain it, in the order of their addresses.
    fn describe(&self, operation: &'static str, ptr: DevicePtr, bytes: usize) -> Result<Box<[MemoryRange]>> {
        let inner = &self.runtime().inner;
        let end = ptr.get() + bytes as u64;
        let leaves = |reached: u64| {
            let message = format!(
                "the memory of {} at {ptr} leaves its allocation, which ends after {}",
                counted(bytes, "byte"),
                counted(reached.saturating_sub(ptr.get()), "byte")
            );
            Error::new(ErrorKind::InvalidPointer, operation, message)
                .with_hint("pass no more bytes than the allocation has from this address on")
        };
        let mut pieces: Vec<MemoryRange> = Vec::new();
        let mut next = ptr;
        while next.get() < end {
            let piece = match inner.backend.describe_memory(self.ordinal(), next) {
                Ok(piece) => piece,
                // No memory follows.
                Err(error) if error.kind() == ErrorKind::InvalidPointer && !pieces.is_empty() => {
                    return Err(leaves(next.get()));
                }
                Err(error) => return Err(self.place_of_memory(operation, next, error)),
            };
            // The next piece begins where the last one ends, and only mappings are one range for work.
            let is_next = pieces.is_empty() || (piece.kind == RangeKind::Mapped && piece.base == next);
            if !piece.contains(next) || !is_next {
                return Err(leaves(next.get()));
            }
            next = piece.base.offset(piece.bytes);
            pieces.push(piece);
            if next.get() < end && piece.kind != RangeKind::Mapped {
                return Err(leaves(next.get()));
            }
        }
        Ok(pieces.into())
    }

    /// Makes a buffer over device memory that other code allocated: `bytes` bytes from `pointer` on. Every operation works
    /// on it as on other buffers. Dropping it never frees the memory. It drops `keep_alive`, once the last use has ended:
    /// every stream and graph has passed its use, and every process that opened a ticket has released it or has died. That may
    /// happen in any thread. An object of this runtime inside `keep_alive` keeps the runtime open until then. A call that fails
    /// drops it at once. In a forked child and once the process exits, `keep_alive` is
    /// leaked.
    ///
    /// The address may lie inside an allocation, and the range may span several mappings that have no gap between them. A
    /// [ticket](DeviceBuffer::share) then names all of them, and the process that opens it maps all of them. It can reach the
    /// bytes beside the buffer, too. [`DeviceBuffer::transport`] tells how other processes open it. Memory of a pool that is freed
    /// in the order of streams, and managed memory, cannot be shared.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use highwater_core::{AllocateOptions, Backend, DeviceMemoryKind, DevicePtr, Transport};
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # struct Tensor { gpu: Arc<MockGpu>, address: DevicePtr }
    /// # impl Tensor {
    /// #     fn new(gpu: &Arc<MockGpu>, bytes: usize) -> highwater_core::Result<Self> {
    /// #         let kind = DeviceMemoryKind::Shareable(Transport::Descriptor);
    /// #         Ok(Self { gpu: gpu.clone(), address: gpu.allocate(0, &AllocateOptions::new(bytes).with_kind(kind))? })
    /// #     }
    /// # }
    /// # impl Drop for Tensor {
    /// #     fn drop(&mut self) {
    /// #         // SAFETY: no work uses the memory.
    /// #         unsafe { self.gpu.free(0, self.address, None) }.unwrap();
    /// #     }
    /// # }
    /// # let gpu = MockGpu::open(MockOptions::new())?;
    /// # let runtime = Runtime::new(gpu.clone())?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// // A tensor of another library, which frees its memory when it is dropped.
    /// let tensor = Tensor::new(&gpu, 4000)?;
    /// let address = tensor.address;
    /// // SAFETY: the tensor keeps these 4000 bytes, and nothing else uses them meanwhile.
    /// let values = unsafe { device.adopt::<f32>(address, 4000, tensor)? };
    /// stream.fill(&values, 0.5_f32)?;
    /// assert_eq!(stream.download(&values)?, vec![0.5; 1000]);
    /// let ticket = values.share()?; // another process opens it with `open_shared`
    /// # let _ = ticket;
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// - `InvalidPointer`: the address is null or in no memory of a device, or the range leaves its allocation.
    /// - `WrongDevice`: the memory belongs to another device.
    /// - `InvalidArgument`: the range is empty, misaligned for `T` or not a whole number of `T`.
    /// - `Unsupported`: `foreign_memory` is false.
    /// - `Capture`: this thread is inside a capture.
    ///
    /// # Safety
    /// The caller must ensure that:
    /// - the memory stays allocated, and mapped at this address, until `keep_alive` is dropped;
    /// - each stream that uses the buffer is ordered after the allocation, if the memory belongs to a pool that is allocated in the
    ///   order of streams;
    /// - work that other code enqueues on these bytes is ordered with the work of this runtime, as for [`DeviceBuffer::ptr`];
    /// - dropping `keep_alive` is sound in any thread.
    pub unsafe fn adopt<T: Element>(
        &self,
        pointer: DevicePtr,
        bytes: usize,
        keep_alive: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        // SAFETY: The caller keeps the contract, which is the same.
        unsafe { self.adopt_for(OPERATION, pointer, bytes, keep_alive) }
    }

    /// As [`Device::adopt`]. The errors carry `operation`.
    ///
    /// # Safety
    /// As for [`Device::adopt`].
    unsafe fn adopt_for<T: Element, K: Send + 'static>(
        &self,
        operation: &'static str,
        pointer: DevicePtr,
        bytes: usize,
        keep_alive: K,
    ) -> Result<DeviceBuffer<T>> {
        let inner = &self.runtime().inner;
        if let Err(error) = inner.check(operation) {
            // Its drop may call the driver.
            std::mem::forget(keep_alive);
            return Err(error);
        }
        refuse_in_capture(operation)?;
        if !self.capabilities().foreign_memory {
            return Err(Error::lacks(operation, "foreign_memory"));
        }
        check_arguments::<T>(operation, pointer, bytes)?;
        let pieces = self.describe(operation, pointer, bytes)?;
        let start = pointer.get() - pieces[0].base.get();
        let adopted = Adopted {
            runtime: self.runtime().clone(),
            parts: pieces.iter().map(|piece| MemoryPart::new(piece.base, piece.bytes as u64)).collect(),
            pieces,
            range: start..start + bytes as u64,
            keep: Mutex::new(Some(KeepAlive::new(keep_alive))),
            ends_late: std::mem::needs_drop::<K>(),
            transport: OnceLock::new(),
            key: OnceLock::new(),
        };
        let block = DeviceBlock::new(&inner.frees, self.ordinal(), pointer, Origin::Shared(Box::new(adopted)));
        Ok(DeviceBuffer::part(self.runtime().clone(), block, 0..bytes / size_of::<T>()))
    }
}

/// Memory that this process allocated past the pools.
struct Outside {
    services: Arc<Services>,
    device: u32,
    ptr: DevicePtr,
}

impl Drop for Outside {
    fn drop(&mut self) {
        // SAFETY: `adopt` drops it once the last use has ended, and nothing else has the address.
        let freed = unsafe { self.services.backend.free(self.device, self.ptr, None) };
        // A refusal is counted. A destructor cannot report it.
        let _ = self.services.note(freed);
    }
}

impl Device {
    /// Allocates memory past the pools, as other code does, and [adopts](Device::adopt) it. The call serves tests of adopted
    /// memory, such as `highwater soak ipc`. The memory is freed once the last use of the buffer has ended, here and in other
    /// processes.
    ///
    /// ```
    /// # use highwater_core::{Runtime, Transport};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let values = runtime.device(0)?.adopt_allocated::<f32>(1000, Transport::Descriptor)?;
    /// stream.fill(&values, 0.5_f32)?;
    /// assert_eq!(values.transport()?, Transport::Descriptor);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Device::adopt`]. `InvalidArgument` for no values. `Unsupported` if the device lacks the transport. `OutOfMemory` as
    /// [`Device::allocate`]. Otherwise the backend's error.
    pub fn adopt_allocated<T: Element>(&self, len: usize, transport: Transport) -> Result<DeviceBuffer<T>> {
        const OPERATION: &str = "adopt_allocated";
        let inner = &self.runtime().inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        if !self.capabilities().ipc_transports.contains(transport) {
            return Err(lacks_transport(OPERATION, transport));
        }
        if len == 0 {
            return Err(invalid(
                OPERATION,
                "0 values cannot be adopted".to_owned(),
                "pass the number of values, at least one",
            ));
        }
        let bytes = size_in_bytes::<T>(OPERATION, len)?;
        let options = AllocateOptions::new(bytes).with_kind(DeviceMemoryKind::Shareable(transport));
        let (services, device) = (Arc::clone(&inner.services), self.ordinal());
        // Unused memory of the pools is freed if none is left.
        let memory = &inner.frees.memory;
        let allocated = memory.with_retry_for(device, bytes, || services.backend.allocate(device, &options));
        let ptr = allocated.map_err(|error| {
            let named =
                Error::new(error.kind(), OPERATION, error.message().to_owned()).with_hint(error.hint().to_owned());
            error.code().into_iter().fold(named, Error::with_code)
        })?;
        // SAFETY: The memory stays until the last argument is dropped, and no other code has its address. The backend may be called
        // in any thread.
        unsafe { self.adopt_for(OPERATION, ptr, bytes, Outside { services, device, ptr }) }
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// Makes a buffer over `len` values in memory that other code allocated and keeps, such as a tensor of another library. It is
    /// [`Device::adopt`] without an object that keeps the memory. All copies, fills, products and downloads take it. Its drop
    /// frees nothing and waits for nothing.
    ///
    /// ```
    /// # use highwater_core::{AllocateOptions, Backend, DeviceBuffer, Runtime};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let gpu = MockGpu::open(MockOptions::new())?;
    /// # let runtime = Runtime::new(gpu.clone())?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// # let address = gpu.allocate(0, &AllocateOptions::new(4000))?;
    /// // SAFETY: the other library keeps these 1000 values until the download has returned.
    /// let values = unsafe { DeviceBuffer::<f32>::from_raw(&device, address, 1000)? };
    /// stream.fill(values.slice(0..500)?, 0.5_f32)?;
    /// assert_eq!(stream.download(values.slice(0..2)?)?, [0.5, 0.5]);
    /// # drop(values);
    /// # // SAFETY: no work uses the memory.
    /// # unsafe { gpu.free(0, address, None)? };
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Device::adopt`].
    ///
    /// # Safety
    /// The caller must meet the obligations of [`Device::adopt`]. Instead of `keep_alive`, the caller must keep the memory until
    /// every stream and graph has passed its last use, and every other process has released it.
    pub unsafe fn from_raw(device: &Device, pointer: DevicePtr, len: usize) -> Result<Self> {
        const OPERATION: &str = "from_raw";
        let bytes = if len == 0 { 0 } else { size_in_bytes::<T>(OPERATION, len)? };
        // SAFETY: The caller keeps the contract, and the memory.
        unsafe { device.adopt_for(OPERATION, pointer, bytes, ()) }
    }

    /// Returns the transport by which other processes open the buffer. For [adopted](Device::adopt) memory, the first call,
    /// or the first share, finds it by trying.
    ///
    /// # Errors
    /// `InvalidArgument` if the buffer cannot be shared, with the reason; else the backend's error.
    pub fn transport(&self) -> Result<Transport> {
        self.block().transport()
    }
}
